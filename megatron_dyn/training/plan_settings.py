# SPDX-License-Identifier: Apache-2.0
"""Flags of `python -m megatron_dyn plan` -> lengths and the planner's settings: those of a run with the same flags. Without torch."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from megatron_dyn.corpus import open_corpus
from megatron_dyn.corpus.computed_lengths import ComputedLengths
from megatron_dyn.planning import CostModel, PlanConfig
from megatron_dyn.planning.alignment import round_up
from megatron_dyn.training.config import AUTO, MOST_MEMORY_GIB, ConfigError, DataConfig, ParallelConfig, require
from megatron_dyn.training.field_flags import add_fields, flag_name, flags_over_file
from megatron_dyn.training.memory import MemorySettings
from megatron_dyn.training.model_config import ModelConfig, check_model_parallel
from megatron_dyn.training.plan_from_settings import AS_GIVEN, cost_model, planner_config, vocabulary

DATA = (*AS_GIVEN, "data_path", "split", "tokenizer_model", "vocab_size", "token_bucket", "cost_file")
PARALLEL = tuple(item.name for item in fields(ParallelConfig))
MODEL = tuple(item.name for item in fields(ModelConfig))
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
"""What a model needs; without all of them the default cost is used."""
SEED = 1234


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of a run have its names, types and help. Nothing has a default: absent means absent."""
    parser = _Parser(
        prog="megatron-dyn plan",
        description="Plan some steps and show what they fill, waste and cost, beside other ways to divide the same documents. "
        "Needs no model and no GPU.",
        epilog="Every other flag of a run is taken too and passed over, as it says nothing about plans. Without --num-layers, --hidden-size "
        "and --num-attention-heads the cost is that of a model of hidden size 4096.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="YAML", help="a run's file of settings; flags win"
    )
    group = parser.add_argument_group("documents and steps (as in a run)")
    add_fields(group, DataConfig, DATA)
    group.add_argument(
        "--lengths", metavar="FILE", help="instead of --data-path: a text file with one length (tokens) a line, or a .npy array"
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of the order of the documents (default: 1234)")
    group = parser.add_argument_group("ranks (as in a run)")
    group.add_argument("--data-parallel-size", type=int, metavar="N", help="copies of the model that share a step (default: 1)")
    add_fields(group, ParallelConfig)
    group.add_argument("--fp8", choices=("e4m3", "hybrid"), help="FP8 matrix products: T is then a multiple of 16 rows on each rank")
    group.add_argument("--tp-comm-overlap", action=argparse.BooleanOptionalAction, help="for --recommend: count UserBuffers (default: no)")
    group.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="for --recommend: train in bf16 (default: yes)")
    add_fields(parser.add_argument_group("model, for the cost and --recommend (as in a run)"), ModelConfig)
    group = parser.add_argument_group("report")
    group.add_argument("--steps", type=int, metavar="N", help="steps to plan (default: 32, or an epoch if it is shorter)")
    group.add_argument("--first-step", type=int, metavar="N", help="the first of them (default: 0)")
    group.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, help="also divide the documents in the other ways (default: yes)"
    )
    group.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    group.add_argument(
        "--output", metavar="DIR", help="write plan.html (one page, no other files needed), its pictures as PNG, and plan.json"
    )
    group = parser.add_argument_group("recommendation")
    group.add_argument(
        "--recommend", action="store_true", help="propose B, the global batch and the token bucket; give neither to have both proposed"
    )
    group.add_argument("--device-memory-gib", type=float, metavar="X", help="memory of one device (needed by --recommend)")
    return parser


def read_flags(argv: Sequence[str] | None) -> tuple[dict[str, object], list[str]]:
    """Flags of a command line by name, and those of a run that say nothing about plans.

    Raises:
        ConfigError: a flag is unknown, or one of Megatron-LM's that a run refuses too.
    """
    parsed, others = build_parser().parse_known_args(argv)
    if not others:
        return vars(parsed), []
    from megatron_dyn.training import arguments  # takes torch's import time, which the command's own flags need not pay

    of_a_run, unknown = arguments.build_parser().parse_known_args(others)
    require(not unknown, f"unrecognized arguments: {' '.join(unknown)}")
    found = arguments.settings_of(of_a_run)
    known = {action.dest for action in build_parser()._actions}
    taken = {name: value for name, value in found.items() if name in known}  # Megatron-LM's spellings of the command's own
    return vars(parsed) | taken, [flag_name(name) for name in found if name not in known]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a command line asks for, checked."""

    lengths: np.ndarray | ComputedLengths
    fingerprint: str | None
    source: str
    """Where the lengths are from, for titles."""
    part: str
    """Which part of it they are."""
    blend: list[str] = field(default_factory=list)
    """What a blend of corpora repeats."""
    parallel: ParallelConfig
    model: ModelConfig | None
    values: dict
    """All settings that were given."""

    def get(self, name: str, default: object = None) -> object:
        value = self.values.get(name)
        return default if value is None else value

    @property
    def data_parallel_size(self) -> int:
        return self.get("data_parallel_size", 1)

    @property
    def budget(self) -> int | None:
        """B where it is given as a number."""
        given = self.get("max_tokens_per_microbatch")
        return None if given == AUTO else given

    @property
    def memory(self) -> MemorySettings:
        """What decides what a rank of a run with these flags holds."""
        return MemorySettings(
            model=self.model,
            parallel=self.parallel,
            vocab_size=self.embedding_rows,
            bf16=self.get("bf16", True),
            data_parallel_size=self.data_parallel_size,
            fp8_recipe="delayed" if self.get("fp8") else None,
            overlap_table={} if self.get("tp_comm_overlap") else None,
        )

    @cached_property
    def vocab_size(self) -> int:
        """0: not given."""
        return _vocab_size(self.values) or 0

    @property
    def embedding_rows(self) -> int:
        """The vocabulary padded, as `padded_vocab_size` does."""
        return round_up(self.vocab_size, math.lcm(self.model.make_vocab_size_divisible_by, self.parallel.tensor_model_parallel_size))

    @property
    def virtual_stages(self) -> int:
        return self.parallel.virtual_pipeline_model_parallel_size or 1

    @cached_property
    def cost(self) -> CostModel:
        """As a run's; without a model the default."""
        return cost_model(self.model, cost_file=self.get("cost_file"), vocab_size=self.vocab_size if self.model else 0)

    def plan_config(self, **changes: object) -> PlanConfig:
        """The planner's settings, as a run makes them.

        Args:
            **changes: settings of the data to take otherwise (`token_bucket` among them).

        Raises:
            ConfigError: they make no plan possible; the message says why.
        """
        return planner_config(
            {name: value for name, value in (self.values | changes).items() if name in DATA},
            self.parallel,
            data_parallel_size=self.data_parallel_size,
            seed=self.get("seed", SEED),
            fp8=self.get("fp8") is not None,
            cost=self.cost,
        )


def read_request(found: dict) -> PlanRequest:
    """Checks what was given and reads the lengths.

    Args:
        found: flags that were given, by name.

    Raises:
        ConfigError: settings are missing or contradict each other.
        ValueError: the corpus or the file of lengths cannot be used.
    """
    values = dict(found)
    if "config" in values:
        from megatron_dyn.training.arguments import read_yaml  # takes torch's import time, which flags alone need not pay

        values = flags_over_file(read_yaml(values["config"]), values)
    known = {action.dest for action in build_parser()._actions}
    values = {name: value for name, value in values.items() if name in known}
    require(
        ("data_path" in values) != ("lengths" in values),
        "exactly one of --data-path (prefix of a .bin/.idx pair) and --lengths (file of lengths) is needed",
    )
    recommend = values.get("recommend", False)
    batches = [name for name in ("global_batch_size", "global_batch_tokens") if values.get(name) is not None]
    if not recommend:
        require(
            values.get("max_tokens_per_microbatch") not in (None, AUTO),
            "no --max-tokens-per-microbatch (a number: a run measures auto when it starts): it is the token budget B of a packed microbatch; "
            "--recommend proposes one",
        )
    require(
        len(batches) == 1 or (recommend and not batches),
        "exactly one of --global-batch-size (documents a step) and --global-batch-tokens is needed, "
        f"not {'both' if batches else 'neither'}",
    )
    for name, least in (("data_parallel_size", 1), ("steps", 1), ("first_step", 0)):
        require(values.get(name, 1) >= least, f"{flag_name(name)} is {values.get(name)}: it must be at least {least}")
    require(not recommend or values.get("device_memory_gib") is not None, "--recommend needs --device-memory-gib: the memory of one device")
    memory = values.get("device_memory_gib", 1.0)
    require(
        0 < memory <= MOST_MEMORY_GIB, f"--device-memory-gib is {memory}: the memory of one device, such as 80 (at most {MOST_MEMORY_GIB:,.0f})"
    )
    given = values.get("vocab_size")
    require(given is None or given >= 1, f"--vocab-size is {given}: it must be at least 1")
    parallel = ParallelConfig(**{name: values[name] for name in PARALLEL if name in values})
    model = _model(values, needed=recommend)
    if model is not None:
        try:
            check_model_parallel(model, parallel)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    require(
        not recommend or values.get("vocab_size") is not None or values.get("tokenizer_model") is not None,
        "--recommend needs --vocab-size or --tokenizer-model: the embedding and the logits are a good part of the memory",
    )
    return PlanRequest(**_documents(values), parallel=parallel, model=model, values=values)


def _vocab_size(values: dict) -> int | None:
    return vocabulary(values.get("tokenizer_model"), values.get("vocab_size"))[0]


def _model(values: dict, *, needed: bool) -> ModelConfig | None:
    given = [name for name in MODEL if values.get(name) is not None]
    missing = [name for name in SHAPE if values.get(name) is None]
    if missing and not needed and not given:
        return None
    flags = ", ".join(map(flag_name, missing))
    require(not missing, f"missing: {flags}: {'--recommend' if needed else 'the cost'} needs the whole shape of the model")
    try:
        return ModelConfig(**{name: values[name] for name in given})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _documents(values: dict) -> dict:
    """Lengths, fingerprint and what is to be said of them."""
    if "lengths" in values:
        return dict(lengths=read_lengths(values["lengths"]), fingerprint=None, source=Path(values["lengths"]).name, part="all lengths of the file")
    split = values.get("split", DataConfig.split)
    corpus = open_corpus(values["data_path"], split=split, seed=values.get("seed", SEED), vocab_size=_vocab_size(values)).train
    require(corpus is not None, f"--split {split}: it leaves nothing to train on; give the first part a share")
    blend = [line.removeprefix("train: ") for line in corpus.report()[1:]]
    if blend:
        blend.insert(0, f"{corpus.num_different_documents:,} different documents")
    names = [Path(part).name for part in values["data_path"]]
    return dict(
        lengths=corpus.lengths, fingerprint=corpus.fingerprint, source=" ".join(names), part=f"training part of --split {split}", blend=blend
    )


def read_lengths(path: str) -> np.ndarray:
    """Lengths in tokens, int64 [D], from a .npy array or a text file with one integer a line.

    Raises:
        ConfigError: the file cannot be read, or holds something else; names the line.
    """
    wanted = "one length (an integer number of tokens) a line, or a .npy array of integers"
    try:
        lengths = np.load(path, allow_pickle=False, mmap_mode="r") if path.endswith(".npy") else _lengths_of_text(Path(path))
    except OSError as error:
        raise ConfigError(f"--lengths {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"--lengths {path}: not text in UTF-8 (byte {error.start} is {byte:#04x}); expected {wanted}") from error
    except ValueError as error:
        raise ConfigError(f"--lengths {path}: {error}; expected {wanted}") from error
    require(
        lengths.ndim == 1 and lengths.dtype.kind in "iu" and lengths.size > 0,
        f"--lengths {path} holds {lengths.dtype} {list(lengths.shape)}: expected integers in one row, at least one",
    )
    return lengths


def _lengths_of_text(path: Path) -> np.ndarray:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if text := line.strip():
            if not text.isdecimal() or len(text) > 18:
                raise ValueError(f"line {number} is {text[:40]!r}")
            found.append(int(text))
    return np.array(found, dtype=np.int64)
