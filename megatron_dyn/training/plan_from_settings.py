# SPDX-License-Identifier: Apache-2.0
"""A run's settings -> the planner's: the one place for a run and for the plan command, so that both plan alike. Without torch."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields

from megatron_dyn.corpus import SentencePieceTokenizer
from megatron_dyn.pipeline.schedule import microbatch_multiple
from megatron_dyn.planning import CostModel, PlanConfig, alignment_for
from megatron_dyn.planning.config import DOCUMENT_ORDERS, MICROBATCHINGS, OVERSIZE_POLICIES
from megatron_dyn.planning.cost_file import read_cost_file
from megatron_dyn.training.config import AUTO, ConfigError, DataConfig, ParallelConfig
from megatron_dyn.training.field_flags import flag_name
from megatron_dyn.training.model_config import ModelConfig

DATA_DEFAULTS: dict[str, object] = {item.name: item.default for item in fields(DataConfig) if item.default is not MISSING}
AS_GIVEN = tuple(item.name for item in fields(PlanConfig) if item.name in DATA_DEFAULTS)
"""Settings of a run's data that reach the planner under their own names."""
FLAGS = ("token_bucket", "seed", "data_parallel_size", *AS_GIVEN)
"""Settings that the planner speaks of and that are flags."""
IN_WORDS = {
    "data_parallel_size": "data-parallel ranks",
    "alignment": "alignment of T",
    "document_alignment": "alignment of each document",
    "microbatch_multiple": "number that K is a multiple of",
    "cost_linear": "cost of a token",
    "cost_quadratic": "cost of a squared token",
    "cost_window": "window of the cost of attention",
}
"""Settings of the planner that follow from flags (or from a cost file) and are none themselves."""
CHOICES = (*OVERSIZE_POLICIES, *MICROBATCHINGS, *DOCUMENT_ORDERS)


def planner_config(
    data: Mapping[str, object], parallel: ParallelConfig, *, data_parallel_size: int, seed: int, fp8: bool, cost: CostModel, **changes: object
) -> PlanConfig:
    """The planner's settings: the only place where T's alignment follows from the parallel sizes.

    Args:
        data: settings of `DataConfig` by name; those that are missing keep their defaults.
        parallel: parallel sizes.
        data_parallel_size: copies of the model.
        seed: of the order of the documents.
        fp8: FP8 matrix products.
        cost: what pieces cost (`cost_model`).
        **changes: fields of `PlanConfig` to set otherwise.

    Raises:
        ConfigError: the settings make no plan possible.
    """
    data = DATA_DEFAULTS | dict(data)
    try:
        settings = {name: data[name] for name in AS_GIVEN} | dict(
            alignment=alignment_for(
                tensor_parallel=parallel.tensor_model_parallel_size,
                sequence_parallel=parallel.sequence_parallel,
                fp8=fp8,
                token_bucket=data["token_bucket"],
            ),
            data_parallel_size=data_parallel_size,
            seed=seed,
            microbatch_multiple=microbatch_multiple(parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size),
            cost=cost,
        )
        settings |= changes
        if settings["max_tokens_per_microbatch"] == AUTO:
            raise ConfigError("--max-tokens-per-microbatch auto is measured when a run starts, and nothing can be planned before: give a number")
        return PlanConfig(**settings)
    except ValueError as error:
        raise ConfigError(in_flags(str(error))) from error


def cost_model(model: ModelConfig | None, *, cost_file: str | None, vocab_size: int) -> CostModel:
    """What pieces cost: measured coefficients where a file is given, else the model's operations, else (no model) the default.

    Args:
        vocab_size: the vocabulary without the rows that pad it, whose number depends on TP: plans need not.

    Raises:
        ConfigError: the file cannot be used.
    """
    if cost_file is None:
        return CostModel() if model is None else model.cost_model(vocab_size)
    try:
        return read_cost_file(cost_file)
    except ValueError as error:
        raise ConfigError(f"--cost-file {error}") from error


def vocabulary(tokenizer_model: str | None, vocab_size: int | None) -> tuple[int | None, SentencePieceTokenizer | None]:
    """The vocabulary's size (None: neither is given), and the tokenizer where there is one.

    Raises:
        ConfigError: the two contradict each other.
        CorpusError: the model cannot be read.
    """
    if tokenizer_model is None:
        return vocab_size, None
    tokenizer = SentencePieceTokenizer(tokenizer_model)
    if vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"--vocab-size {vocab_size} contradicts the {tokenizer.vocab_size} pieces of {tokenizer_model}: leave --vocab-size out"
        )
    return tokenizer.vocab_size, tokenizer


def name_of_plan_setting(name: str) -> str:
    """What a setting of the planner is called in messages: its flag where it has one."""
    return IN_WORDS.get(name) or flag_name(name)


def in_flags(message: str) -> str:
    """The planner's words with flags in the place of its settings: `oversize='split'` -> `--oversize split`."""
    message = re.sub(r"\bdrop_last=(True|False)", lambda found: "--drop-last" if found[1] == "True" else "--no-drop-last", message)
    assigned = rf"\b({'|'.join(FLAGS)})=(?:'([^']*)'|(-?\w+))"
    message = re.sub(assigned, lambda found: f"{flag_name(found[1])} {found[2] or found[3]}", message)
    message = re.sub(rf"'({'|'.join(CHOICES)})'", r"\1", message)
    named = "|".join(name for name in FLAGS if "_" in name)
    return re.sub(rf"(?<![\w-])({named}|seed(?= must))\b", lambda found: flag_name(found[1]), message)
