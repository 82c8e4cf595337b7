# SPDX-License-Identifier: Apache-2.0
"""What --tp-comm-overlap and --fp8 refuse, before anything starts, and what follows from them."""

import numpy as np
import pytest

from megatron_dyn.planning import Planner
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.config import ConfigError

BASE = (
    "--data-path none --vocab-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-tokens-per-microbatch 100 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 2"
).split()
TENSOR = ["--tensor-model-parallel-size", "4", "--sequence-parallel"]


def parsed(*words: str, world_size: int = 4):
    return parse_arguments([*BASE, *TENSOR, *words], world_size=world_size)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--disable-tp-comm-bulk-dgrad"], "--disable-tp-comm-bulk-dgrad without --tp-comm-overlap"),
        (["--tp-comm-overlap-cfg", "absent.yaml"], "--tp-comm-overlap-cfg without --tp-comm-overlap"),
        (["--ub-layout-fence", "always"], "--ub-layout-fence without --tp-comm-overlap"),
        (["--tp-comm-overlap", "--no-sequence-parallel"], "without --sequence-parallel"),
        (["--fp8", "hybrid"], "--fp8 needs --bf16"),
        (["--fp8", "int8", "--bf16"], "invalid choice: 'int8'"),
        (["--bf16", "--fp8", "hybrid", "--fp8-amax-history-len", "0"], "at least 1"),
        (["--bf16", "--fp8", "hybrid", "--fp8-recipe", "mxfp8"], "invalid choice: 'mxfp8'"),
    ],
)
def test_contradictions_are_refused_by_name(words, says):
    with pytest.raises(ConfigError, match=says):
        parsed(*words)


def test_overlap_without_tensor_parallelism_is_refused():
    with pytest.raises(ConfigError, match="with TP 1"):
        parse_arguments([*BASE, "--tp-comm-overlap", "--sequence-parallel"], world_size=1)


@pytest.mark.parametrize(
    "table, words, says",
    [
        (None, [], "No such file"),
        ("qkv_fprob: {}", [], "did you mean 'qkv_fprop'"),
        ("qkv_dgrad: {method: pipeline}", [], "give --tp-comm-overlap-rs-dgrad too"),
        ("qkv_dgrad: {method: bulk}", ["--tp-comm-overlap-rs-dgrad"], "the table makes it 'bulk'"),
        ("proj_fprop: {num_splits: 3}", [], "divide the hidden size 64"),
    ],
)
def test_a_table_that_cannot_work_is_refused_before_anything_starts(tmp_path, table, words, says):
    path = tmp_path / "overlap.yaml"
    if table is not None:
        path.write_text(table)
    with pytest.raises(ConfigError, match=says):
        parsed("--tp-comm-overlap", "--tp-comm-overlap-cfg", str(path), *words)


def test_a_hidden_size_that_the_default_splits_do_not_divide_is_refused_with_the_way_out(tmp_path):
    odd = ["--tp-comm-overlap", "--hidden-size", "72", "--num-attention-heads", "12", "--kv-channels", "6"]
    parsed(*odd)
    odd[2] = "66"
    with pytest.raises(ConfigError, match="--tp-comm-overlap: proj_fprop .* divide the hidden size 66. Set num_splits of proj_fprop"):
        parsed(*odd)
    path = tmp_path / "overlap.yaml"
    path.write_text("proj_fprop: {num_splits: 2}\nfc2_fprop: {method: ring_exchange}")
    parsed(*odd, "--tp-comm-overlap-cfg", str(path))


def test_megatrons_spellings_turn_the_parts_off():
    off = "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad"
    overlap = parsed("--tp-comm-overlap", *off.split()).overlap
    assert not any((overlap.tp_comm_overlap_ag, overlap.tp_comm_overlap_rs, overlap.tp_comm_bulk_dgrad, overlap.tp_comm_bulk_wgrad))
    assert parsed("--tp-comm-overlap").overlap.tp_comm_overlap_ag


def test_fp8_has_megatrons_own_name_too():
    assert parsed("--bf16", "--fp8-format", "hybrid").fp8.fp8 == "hybrid"
    with pytest.raises(ConfigError, match="invalid choice: 'int8'"):
        parsed("--bf16", "--fp8-format", "int8")


def test_reduce_scatter_beside_dgrad_brings_its_communicators_along():
    """Megatron-LM would hand an all-gather to the layer unless the user's table says otherwise."""
    table = parsed("--tp-comm-overlap", "--tp-comm-overlap-rs-dgrad").overlap.table
    assert {name: options["method"] for name, options in table.items()} == {"qkv_dgrad": "ring_exchange", "fc1_dgrad": "ring_exchange"}


def test_fp8_aligns_the_local_rows_of_every_rank():
    assert parsed().plan_config(data_parallel_size=1).capacity == 100
    with_fp8 = parsed("--bf16", "--fp8", "hybrid").plan_config(data_parallel_size=1)
    assert (with_fp8.alignment, with_fp8.capacity) == (64, 128)


def test_padding_to_the_capacity_leaves_one_shape():
    config = parsed("--microbatching", "packed-fixed", "--max-tokens-per-microbatch", "101").plan_config(data_parallel_size=2)
    plan = Planner(np.array([30, 20, 100]), config).plan(0)
    assert config.capacity == 104 and {microbatch.T for rank in plan.microbatches for microbatch in rank} == {104}
