# SPDX-License-Identifier: Apache-2.0
"""Command line and YAML -> `RunConfig`. Flags are made from the configuration's fields; flags win over YAML.

A field `max_tokens_per_microbatch` is the flag `--max-tokens-per-microbatch` and the YAML key `max_tokens_per_microbatch`
(dashes work too; keys may stand at the top level or below the section they belong to). The text below a field is its help.
"""

import argparse
import dataclasses
import difflib
import typing
from pathlib import Path

import yaml

from megatron_dyn.training import config as settings
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.field_flags import add_fields, base_type, field_docs, flag_name, flags_over_file, words_beside
from megatron_dyn.training.model_config import ModelConfig
from megatron_dyn.training.overlap import Fp8Config, OverlapConfig
from megatron_dyn.training.run_config import RunConfig

SECTIONS: dict[str, tuple[str, type]] = {
    "model": ("model", ModelConfig),
    "parallel": ("parallelism", settings.ParallelConfig),
    "overlap": ("communication overlap", OverlapConfig),
    "fp8": ("FP8", Fp8Config),
    "data": ("data and microbatches", settings.DataConfig),
    "optimizer": ("optimizer and learning rate", settings.OptimizerSettings),
    "training": ("training", settings.TrainingConfig),
    "checkpoint": ("checkpoints", settings.CheckpointConfig),
    "logging": ("logging", settings.LoggingConfig),
}

# Megatron-LM's own spellings of what is a field under another name here: flag -> (field, value it sets; None: it takes one).
MEGATRON_SPELLINGS: dict[str, tuple[str, object]] = {
    "--disable-bias-linear": ("add_bias_linear", False),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--disable-tp-comm-overlap-ag": ("tp_comm_overlap_ag", False),
    "--disable-tp-comm-overlap-rs": ("tp_comm_overlap_rs", False),
    "--disable-tp-comm-bulk-dgrad": ("tp_comm_bulk_dgrad", False),
    "--disable-tp-comm-bulk-wgrad": ("tp_comm_bulk_wgrad", False),
    "--fp8-format": ("fp8", None),
}

# Megatron-LM's flags that cannot mean anything here, or not yet: refused with the way out instead of "unrecognized".
REFUSED: dict[str, str] = {
    "micro_batch_size": "microbatches are packed up to a token budget instead: --max-tokens-per-microbatch (or --microbatching fixed-count)",
    "seq_length": "T differs from microbatch to microbatch: --max-tokens-per-microbatch sets the budget, "
    "--max-position-embeddings the table of learned positions",
    "rampup_batch_size": "every step is planned from one global batch: --global-batch-size or --global-batch-tokens",
    "fp16": "loss scaling is not supported: use --bf16",
    "context_parallel_size": "context parallelism is not supported by this version: use tensor and pipeline parallelism",
    "num_experts": "mixtures of experts are not supported: leave it out",
    "train_samples": "a run is counted in optimizer steps: --train-iters",
    "num_layers_per_virtual_pipeline_stage": "give the number of chunks instead: --num-virtual-stages-per-pipeline-rank",
}

# Sub-words of Megatron-LM's launch scripts that ask for what is always so here: accepted in silence.
_ALREADY_SO = ("--use-mcore-models", "--use-dist-ckpt", "--accumulate-allreduce-grads-in-fp32", "--calculate-per-token-loss")


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving, so that the caller has one place for errors."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `pretrain_gpt_thd.py`, one help group for each section. Nothing has a default: absent means absent."""
    parser = _Parser(
        prog="pretrain_gpt_thd.py",
        description="Pretrain a GPT on packed THD microbatches whose number of tokens T is planned, not padded.",
        epilog="Every flag is also a key of the YAML file (--config); flags win. Booleans have a --no- form.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="YAML", help="file with any of these settings; flags win over it")
    for title, cls in SECTIONS.values():
        group = parser.add_argument_group(title)
        add_fields(group, cls)
    for flag in _ALREADY_SO:
        parser.add_argument(flag, action="store_true", dest="_already_so", help=argparse.SUPPRESS)
    for name in REFUSED:
        parser.add_argument(flag_name(name), nargs="*", dest=f"_refused_{name}", help=argparse.SUPPRESS)
    known = {flag for action in parser._actions for flag in action.option_strings}
    for flag, (name, value) in MEGATRON_SPELLINGS.items():
        if flag in known:
            continue
        if value is None:
            choices = next(action.choices for action in parser._actions if action.dest == name)
            parser.add_argument(flag, dest=name, choices=choices, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, action="store_const", const=value, dest=name, help=argparse.SUPPRESS)
    return parser


def parse_arguments(argv: list[str], *, world_size: int) -> RunConfig:
    """Settings of a run from flags and the YAML file they name.

    Args:
        argv: Arguments without the program's name.
        world_size: Ranks of the job.

    Returns:
        RunConfig: Validated; its checks need no process group and no device.

    Raises:
        ConfigError: A setting is unknown, has the wrong type, contradicts another one or does not fit the ranks.
    """
    found = settings_of(build_parser().parse_args(argv))
    path = found.pop("config", None)
    values = flags_over_file(read_yaml(path) if path is not None else {}, found)
    run = build_config(values)
    run.parallel.data_parallel_size(world_size)
    return run


def settings_of(parsed: argparse.Namespace) -> dict[str, object]:
    """Settings by name from what `build_parser` made of the flags.

    Raises:
        ConfigError: One of Megatron-LM's flags that cannot mean anything here, with the way out.
    """
    found = vars(parsed)
    refused = [name.removeprefix("_refused_") for name in found if name.startswith("_refused_")]
    if refused:
        raise ConfigError("; ".join(f"{flag_name(name)}: {REFUSED[name]}" for name in refused))
    return {name: value for name, value in found.items() if name != "_already_so"}


def build_config(values: dict[str, object]) -> RunConfig:
    """A validated `RunConfig` from flat values; fields that are absent keep their defaults.

    Raises:
        ConfigError: A value is out of range or contradicts another one.
    """
    sections = {}
    for section, (_, cls) in SECTIONS.items():
        names = {item.name for item in dataclasses.fields(cls)}
        missing = [
            item.name
            for item in dataclasses.fields(cls)
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING and item.name not in values
        ]
        if missing:
            raise ConfigError(f"missing: {', '.join(map(flag_name, missing))}")
        try:
            sections[section] = cls(**{name: value for name, value in values.items() if name in names})
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return RunConfig(**sections)


def read_yaml(path: str) -> dict[str, object]:
    """Flat settings from a YAML file: keys at the top level or below their section's name.

    Raises:
        ConfigError: The file cannot be read, or a key or a value's type is not one of the settings.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds a {type(content).__name__}; expected settings as 'name: value' lines")
    types_of = {name: hint for _, cls in SECTIONS.values() for name, hint in typing.get_type_hints(cls).items()}
    values: dict[str, object] = {}

    def take(key: object, value: object, section: str | None) -> None:
        name = str(key).lstrip("-").replace("-", "_")
        if section is None and name in SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                take(inner, inner_value, name)
            return
        allowed = types_of if section is None else typing.get_type_hints(SECTIONS[section][1])
        if name in REFUSED:
            raise ConfigError(f"--config {path}: {key}: {REFUSED[name]}")
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            where = f" in section {section!r}" if section else ""
            raise ConfigError(f"--config {path}: unknown setting {key!r}{where}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if name in values:
            raise ConfigError(f"--config {path}: {key!r} is set twice")
        values[name] = _checked(path, name, value, allowed[name])

    for key, value in content.items():
        take(key, value, None)
    return values


def _checked(path: str, name: str, value: object, hint: object) -> object:
    """A YAML value in the field's type; numbers may be written as 1e-4 (which YAML reads as text)."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    base, choices = base_type(hint)
    if value in words_beside(hint):
        return value
    if base is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif base is list:
        items = value.split() if isinstance(value, str) else value
        if isinstance(items, list) and not any(isinstance(item, (dict, list)) for item in items):
            return [str(item) for item in items]
    elif choices is not None:
        if value in choices:
            return value
    elif base is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    elif type(value) is base:
        return value
    expected = f"one of {', '.join(map(str, choices))}" if choices else " or ".join([base.__name__, *words_beside(hint)])
    raise ConfigError(f"--config {path}: {name} is {value!r}; expected {expected}")


def flags_page() -> str:
    """The settings as a Markdown page: a table for each section. `docs/flags.md` is this text."""
    lines = [
        "# Flags of `pretrain_gpt_thd.py`",
        "",
        "Each is also a key of the YAML file given with `--config` (dashes or underscores, at the top level or below its section's name);",
        "flags win, and one of an either/or (the two global batches, the two warmups) takes the place of the file's other half.",
        "Booleans have a `--no-` form. This page is written by `python -m megatron_dyn flags`.",
    ]
    for section, (title, cls) in SECTIONS.items():
        lines += ["", f"## {title} (`{section}:`)", "", "| flag | default | meaning |", "|---|---|---|"]
        docs, hints = field_docs(cls), typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            base, choices = base_type(hints[item.name])
            kind = "" if base is bool else f" {' or '.join(map(str, choices))}" if choices else f" {'X ...' if base is list else ' or '.join([base.__name__, *words_beside(hints[item.name])])}"
            needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
            default = "needed" if needed else "" if item.default in (None, dataclasses.MISSING) else f"`{item.default}`"
            lines.append(f"| `{flag_name(item.name)}`{kind} | {default} | {docs[item.name]} |")
    lines += ["", "## Refused, with the way out", "", "| flag of Megatron-LM | instead |", "|---|---|"]
    lines += [f"| `{flag_name(name)}` | {way_out} |" for name, way_out in REFUSED.items()]
    return "\n".join(lines) + "\n"
