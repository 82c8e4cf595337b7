# SPDX-License-Identifier: Apache-2.0
"""The memory model's layers in flight and its division over ranks against the bytes of living tensors of real steps, on a CPU.

A layer of Megatron's own, without fused kernels, keeps about half as much again as one of Transformer Engine's, whose formulas are compared
with a GPU's peaks in `test_memory.py`. That factor is measured on one rank. All other ranks must show the same one.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from launch import launch  # noqa: E402

from megatron_dyn import device  # noqa: E402
from megatron_dyn.training import memory as memory_module  # noqa: E402
from megatron_dyn.training.arguments import parse_arguments  # noqa: E402
from megatron_dyn.training.budget_probe import ModelProbe  # noqa: E402
from megatron_dyn.training.distributed import initialize  # noqa: E402
from megatron_dyn.training.inputs import prepare_device  # noqa: E402
from megatron_dyn.training.memory import WORKSPACE_BYTES, memory_settings, rank_memory  # noqa: E402

SHAPE = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 512 --num-attention-heads 4 --vocab-size 2048 --untie-embeddings-and-output-weights"
RUN = "--data-path none --max-tokens-per-microbatch 512 --global-batch-size 64 --lr 1e-4 --train-iters 10 --eval-iters 0"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "TP 2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP 2": "--pipeline-model-parallel-size 2",
    "PP 2 VPP 2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "DP 2": "--use-distributed-optimizer",
}


def measured_and_computed(rank: int, world: int, flags: str) -> list[tuple[int, float]]:
    """For two T, the measured peak and the computed one."""
    run = parse_arguments(f"{SHAPE} {RUN} --no-gradient-accumulation-fusion {flags}".split(), world_size=world)
    _, layers = prepare_device(run)
    initialize(run.parallel, backend="gloo", seed=1)
    from megatron.core import parallel_state

    settings = memory_settings(run, vocab_size=2048, data_parallel_size=parallel_state.get_data_parallel_world_size())
    memory = rank_memory(settings, parallel_state.get_pipeline_model_parallel_rank())
    inputs = SimpleNamespace(vocab_size=2048, layers=layers, process_group_backend="gloo")
    found = []
    with device.MemoryMeter() as meter:
        probe = ModelProbe(run, inputs, meter, longest=64)
        for tokens in (256, 512):
            found.append((probe.peak(tokens), memory.allocated(tokens, tables=0) - WORKSPACE_BYTES))
        probe.close()
        left = sum(storage.nbytes() for reference in meter._tensors._known.values() if (storage := reference()) is not None)
        assert left < 0.01 * found[0][0], f"the probe left {left} bytes behind"
    return found


def slope_against_the_model(low: tuple[int, float], high: tuple[int, float]) -> float:
    return (high[0] - low[0]) / (high[1] - low[1])


@pytest.fixture(scope="module")
def of_one_rank() -> float:
    return slope_against_the_model(*launch(1, measured_and_computed, "")[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_token_takes_what_the_schedule_and_the_division_say(case, of_one_rank):
    for rank, found in enumerate(launch(2, measured_and_computed, CASES[case])):
        assert slope_against_the_model(*found) == pytest.approx(of_one_rank, rel=0.07), f"rank {rank}"


@pytest.mark.slow
def test_mutant_one_microbatch_in_flight_is_caught(of_one_rank, monkeypatch):
    monkeypatch.setattr(memory_module, "most_in_flight", lambda rank, **shape: 1)
    first, _ = launch(2, measured_and_computed, CASES["PP 2"])
    assert slope_against_the_model(*first) > 1.3 * of_one_rank
