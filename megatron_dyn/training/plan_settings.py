# SPDX-License-Identifier: Apache-2.0
"""Flags of `python -m megatron_dyn plan` -> lengths and the planner's settings: those of a run with the same flags. Without torch."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

import numpy as np

from megatron_dyn.corpus import open_corpus
from megatron_dyn.pipeline.schedule import microbatch_multiple
from megatron_dyn.planning import CostModel, PlanConfig, alignment_for
from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.cost_file import read_cost_file
from megatron_dyn.training.config import ConfigError, DataConfig, ParallelConfig, require
from megatron_dyn.training.field_flags import add_fields
from megatron_dyn.training.model_config import ModelConfig, check_model_parallel

DATA = (
    "data_path", "split", "vocab_size", "max_tokens_per_microbatch", "global_batch_size", "global_batch_tokens",
    "max_documents_per_microbatch", "max_sum_squares_per_microbatch",
    "oversize", "drop_last", "token_bucket", "cost_file", "microbatching", "documents_per_microbatch", "document_order",
)  # fmt: skip
PARALLEL = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "use_distributed_optimizer",
)  # fmt: skip
MODEL = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels", "swiglu", "normalization",
    "hidden_dropout", "untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules",
)  # fmt: skip
SHAPE = ("num_layers", "hidden_size", "num_attention_heads")
"""What a model needs; without all of them the default cost is used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The flags; those of a run have its names, types and help. Nothing has a default: absent means absent."""
    parser = _Parser(
        prog="megatron-dyn plan",
        description="Plan some steps and show what they fill, waste and cost, beside other ways to divide the same documents. "
        "Needs no model and no GPU.",
        epilog="Without --num-layers, --hidden-size and --num-attention-heads the cost is that of a model of hidden size 4096.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="YAML", help="a run's file of settings; flags win, and what says nothing about plans is passed over"
    )
    group = parser.add_argument_group("documents and steps (as in a run)")
    add_fields(group, DataConfig, DATA)
    group.add_argument(
        "--lengths", metavar="FILE", help="instead of --data-path: a text file with one length (tokens) a line, or a .npy array"
    )
    group.add_argument("--seed", type=int, metavar="N", help="seed of the order of the documents (default: 1234)")
    group = parser.add_argument_group("ranks (as in a run)")
    group.add_argument("--data-parallel-size", type=int, metavar="N", help="copies of the model that share a step (default: 1)")
    add_fields(group, ParallelConfig, PARALLEL)
    group.add_argument("--fp8", choices=("e4m3", "hybrid"), help="FP8 matrix products: T is then a multiple of 16 rows on each rank")
    group.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="for --recommend: train in bf16 (default: yes)")
    add_fields(parser.add_argument_group("model, for the cost and --recommend (as in a run)"), ModelConfig, MODEL)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanRequest:
    """What a command line asks for, checked."""

    lengths: np.ndarray
    fingerprint: str | None
    source: str
    """Where the lengths are from, for titles."""
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
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return round_up(self.get("vocab_size", 0), self.model.make_vocab_size_divisible_by if self.model else 1)

    @property
    def virtual_stages(self) -> int:
        return self.parallel.virtual_pipeline_model_parallel_size or 1

    def cost(self) -> CostModel:
        """As `RunConfig.cost_model` finds it; without a model the default."""
        if "cost_file" in self.values:
            return read_cost_file(self.values["cost_file"])
        return self.model.cost_model() if self.model is not None else CostModel()

    def plan_config(self, **changes: object) -> PlanConfig:
        """The planner's settings, as `RunConfig.plan_config` makes them.

        Args:
            **changes: settings to take otherwise (`token_bucket` among them).

        Raises:
            ValueError: they make no plan possible; the message says why.
        """
        found = self.values | changes
        alignment = alignment_for(
            tensor_parallel=self.parallel.tensor_model_parallel_size,
            sequence_parallel=self.parallel.sequence_parallel,
            fp8=self.get("fp8") is not None,
            token_bucket=found.get("token_bucket", 1),
        )
        taken = {item.name for item in fields(PlanConfig)} - {"alignment", "cost", "microbatch_multiple", "data_parallel_size"}
        return PlanConfig(
            **{name: value for name, value in found.items() if name in taken},
            alignment=alignment,
            data_parallel_size=self.data_parallel_size,
            microbatch_multiple=microbatch_multiple(
                self.parallel.pipeline_model_parallel_size, self.parallel.virtual_pipeline_model_parallel_size
            ),
            cost=self.cost(),
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
        from megatron_dyn.training.arguments import read_yaml  # takes Megatron-Core's import time, which flags alone need not pay

        values = read_yaml(values["config"]) | values
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
            values.get("max_tokens_per_microbatch") is not None,
            "no --max-tokens-per-microbatch: it is the token budget B of a packed microbatch; --recommend proposes one",
        )
    require(
        len(batches) == 1 or (recommend and not batches),
        "exactly one of --global-batch-size (documents a step) and --global-batch-tokens is needed, "
        f"not {'both' if batches else 'neither'}",
    )
    require(values.get("data_parallel_size", 1) >= 1, f"--data-parallel-size is {values.get('data_parallel_size')}: it must be at least 1")
    require(not recommend or values.get("device_memory_gib") is not None, "--recommend needs --device-memory-gib: the memory of one device")
    parallel = ParallelConfig(**{name: values[name] for name in PARALLEL if name in values})
    model = _model(values, needed=recommend)
    if model is not None:
        try:
            check_model_parallel(model, parallel)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    require(
        not recommend or values.get("vocab_size") is not None,
        "--recommend needs --vocab-size: the embedding and the logits are a good part of the memory",
    )
    lengths, fingerprint, source = _lengths(values)
    return PlanRequest(lengths=lengths, fingerprint=fingerprint, source=source, parallel=parallel, model=model, values=values)


def _model(values: dict, *, needed: bool) -> ModelConfig | None:
    given = [name for name in MODEL if values.get(name) is not None]
    missing = [name for name in SHAPE if values.get(name) is None]
    if missing and not needed and not given:
        return None
    flags = ", ".join("--" + name.replace("_", "-") for name in missing)
    require(not missing, f"missing: {flags}: {'--recommend' if needed else 'the cost'} needs the whole shape of the model")
    try:
        return ModelConfig(**{name: values[name] for name in given})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _lengths(values: dict) -> tuple[np.ndarray, str | None, str]:
    if "lengths" in values:
        return read_lengths(values["lengths"]), None, Path(values["lengths"]).name
    corpus = open_corpus(values["data_path"], split=values.get("split", DataConfig.split), seed=values.get("seed", 1234)).train
    require(corpus is not None, f"--split {values.get('split')}: it leaves nothing to train on; give the first part a share")
    names = [Path(part).name for part in values["data_path"]]
    return corpus.lengths, corpus.fingerprint, " ".join(names)


def read_lengths(path: str) -> np.ndarray:
    """Lengths in tokens, int64 [D], from a .npy array or a text file with one integer a line.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        if path.endswith(".npy"):
            lengths = np.load(path, allow_pickle=False, mmap_mode="r")
        else:
            lengths = np.array([int(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()], dtype=np.int64)
    except OSError as error:
        raise ConfigError(f"--lengths {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--lengths {path}: one length (an integer number of tokens) a line, or a .npy array of integers: {error}"
        ) from error
    require(
        lengths.ndim == 1 and lengths.dtype.kind in "iu" and lengths.size > 0,
        f"--lengths {path} holds {lengths.dtype} {list(lengths.shape)}: expected integers in one row, at least one",
    )
    return lengths
