# SPDX-License-Identifier: Apache-2.0
"""PP x VPP x how messages travel x K, each with a step of constant T and one of different T, and an evaluation: equal to the reference.

A step has K documents, each in a microbatch of its own (the interleaved schedule gets fillers up to a multiple of PP). The reference is
one rank that reads one unpadded document at a time. Each case has its own time-out; a hang fails with the stack of every rank.
"""

import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from launch import RanksFailed, launch
from planned_mutants import backward_posted_first, chunk_ignored, forward_position_for_backward, last_microbatch
from reference import GPT2, LLAMA, LOSS_TOLERANCE, check_step, make_documents, reference_steps
from trained_steps import Run, Scenario, check_scenario, launch_scenario

import megatron_dyn.pipeline.planned_p2p as planned_p2p
import megatron_dyn.training.model as model
import megatron_dyn.training.step as step
from megatron_dyn.pipeline.schedule import microbatch_multiple

BATCHED = dict(overlap_p2p_communication=False)
OVERLAPPED = dict()
FLUSHED = dict(overlap_p2p_communication_warmup_flush=True)
UNBATCHED = dict(overlap_p2p_communication=False, unbatched=True)
WAYS = {"batched": BATCHED, "unbatched": UNBATCHED, "overlapped": OVERLAPPED, "warm-up flush": FLUSHED}
DIFFERENT = (16, 3, 9, 1, 12, 5, 14, 2, 7)  # one after another, no two alike
CONSTANT = (11,) * 9


def scenario(pp: int, vpp: int, k: int, way: str, gpt=LLAMA, **changes) -> Scenario:
    documents = make_documents(CONSTANT[:k] + DIFFERENT[:k])
    parallel = {name: value for name, value in WAYS[way].items() if name != "unbatched"}
    return Scenario(
        documents=documents, budget=16, batch=k, steps=2, gpt=replace(gpt, layers=pp * vpp), pp=pp, vpp=vpp if vpp > 1 else None,
        packing={"max_documents_per_microbatch": 1}, parallel=parallel, **changes,
    )  # fmt: skip


def train_and_evaluate(rank: int, world: int, case: Scenario):
    """Both steps, then the loss on the first one's documents without gradients."""
    run = Run(case)
    steps = [run.train(number) for number in range(case.steps)]
    _, microbatches = run.microbatches(0)
    evaluation, _ = run.stepper.forward_backward(microbatches, forward_only=True)
    return steps, evaluation.mean, len(microbatches), run.stepper.models[0].config


def check(case: Scenario, way: str, monkeypatch) -> None:
    if way == "unbatched":
        settings = model.schedule_settings
        monkeypatch.setattr(model, "schedule_settings", lambda *sizes, **how: settings(*sizes, **how) | {"batch_p2p_comm": False})
    results = launch(case.world, train_and_evaluate, case, timeout=60.0 + 10.0 * case.pp)
    first, second = case.document_steps()
    expected = reference_steps(case.gpt, (first, second, first))
    for number in range(2):
        check_step([steps[number] for steps, *_ in results], expected[number])
    multiple = microbatch_multiple(case.pp, case.vpp)
    for _, loss, microbatches, config in results:
        assert abs(loss - expected[2].loss) / expected[2].loss <= LOSS_TOLERANCE
        assert microbatches == -(-case.batch // multiple) * multiple
        assert config.deallocate_pipeline_outputs and config.batch_p2p_comm == (way == "batched")
        assert config.overlap_p2p_comm == (way in ("overlapped", "warm-up flush"))
        assert config.overlap_p2p_comm_warmup_flush == (way == "warm-up flush")


def named(value) -> str:
    return {LLAMA: "llama", GPT2: "gpt2"}.get(value, str(value))


EACH_KIND = [
    (2, 1, 1, "unbatched", LLAMA),
    (2, 2, 4, "batched", LLAMA),  # each rank is the other's next and previous
    (2, 2, 4, "unbatched", GPT2),
    (2, 3, 6, "warm-up flush", GPT2),
    (3, 1, 5, "batched", LLAMA),
    (3, 2, 3, "overlapped", LLAMA),
    (4, 2, 4, "batched", LLAMA),  # hangs with shape messages
    (4, 2, 5, "warm-up flush", LLAMA),
]


@pytest.mark.parametrize("pp, vpp, k, way, gpt", EACH_KIND, ids=named)
def test_each_kind_equals_the_reference(pp, vpp, k, way, gpt, monkeypatch):
    check(scenario(pp, vpp, k, way, gpt), way, monkeypatch)


def whole_matrix():
    for pp, counts in ((2, range(1, 10)), (3, range(1, 10)), (4, (1, 2, 3, 4, 5, 8, 9)), (8, (1, 4, 9))):
        for k in counts:
            for vpp in (1, 2, 3, 4):
                for way in ("batched", "unbatched") if vpp == 1 else WAYS:
                    if vpp == 1 or k % pp in (0, 1):  # other K are filled up to the same number of microbatches
                        yield pp, vpp, k, way, (LLAMA, GPT2)[(pp + vpp + k) % 2]


@pytest.mark.slow
@pytest.mark.parametrize("pp, vpp, k, way, gpt", list(whole_matrix()), ids=named)
def test_the_whole_matrix_equals_the_reference(pp, vpp, k, way, gpt, monkeypatch):
    check(scenario(pp, vpp, k, way, gpt), way, monkeypatch)


def count_exchanges(rank: int, world: int, case: Scenario):
    """Shapes of all that is sent, and how often the schedule waits for the device or copies a tensor to the host."""
    run, sent, waits = Run(case), [], []
    originals = c10d.isend, torch.cuda.synchronize, torch.Tensor.tolist

    def isend(tensor, *args, **kwargs):
        sent.append(tuple(tensor.shape))
        return originals[0](tensor, *args, **kwargs)

    _, microbatches = run.microbatches(1)
    c10d.isend = dist.isend = isend
    torch.cuda.synchronize = lambda *args: waits.append("synchronize")
    torch.Tensor.tolist = lambda self: waits.append("tolist") if "pipeline" in sys._getframe(1).f_code.co_filename else originals[2](self)
    run.stepper.forward_backward(microbatches, forward_only=False)
    return sent, waits, [microbatch.T for microbatch in microbatches]


@pytest.mark.parametrize("vpp, way", [(1, "batched"), (2, "overlapped")])
def test_nothing_but_activations_and_gradients_travels_and_nothing_waits_for_the_device(vpp, way):
    results = launch(2, count_exchanges, scenario(2, vpp, 4, way))
    T = results[0][2]
    links = 2 * vpp - 1
    assert sorted(shape for sent, *_ in results for shape in sent) == sorted([(length, 1, 32) for length in T] * 2 * links)
    assert all(waits == [] for _, waits, _ in results)


# Refusals and mutants -------------------------------------------------------------------------------------------------


def run_too_few(rank: int, world: int, case: Scenario) -> str:
    run = Run(case)
    with pytest.raises(ValueError, match="3 microbatches on 2 pipeline ranks with 2 chunks each") as refused:
        run.stepper.forward_backward(run.microbatches(0)[1][:3], forward_only=False)
    return str(refused.value)


def test_a_number_of_microbatches_without_a_schedule_is_refused_before_anything_is_sent():
    told = launch(2, run_too_few, scenario(2, 2, 4, "overlapped"))
    assert told[0] == told[1]


def test_a_tensor_of_another_length_than_planned_is_named(monkeypatch):
    shape = planned_p2p.PlannedP2PCommunicator._shape
    monkeypatch.setattr(planned_p2p.PlannedP2PCommunicator, "_shape", lambda *args: (shape(*args)[0] + 1, *shape(*args)[1:]))
    told = r"forward activation to the next stage of microbatch 0, chunk 0 has shape \(11, 1, 32\).*\(12, 1, 32\)"
    with pytest.raises(RanksFailed, match=told):
        launch(2, train_and_evaluate, scenario(2, 1, 2, "batched"), timeout=30)


def compute_in_another_order(rank: int, world: int, case: Scenario) -> None:
    """The second stage reads its microbatches backwards; messages still follow the plan."""
    run = Run(case)
    _, microbatches = run.microbatches(1)
    T = [microbatch.T for microbatch in microbatches]
    mine = microbatches[::-1] if rank == 1 else microbatches
    run.stepper.schedule.run(step.forward_step, run.models, [iter(mine)], T=T, forward_only=True)


def test_a_chunk_refuses_rows_of_another_microbatch():
    with pytest.raises(RanksFailed, match=r"microbatch 1 of step 1 \(T = 3, 3 rows on each rank\) received 16 rows from the previous stage"):
        launch(2, compute_in_another_order, scenario(2, 1, 2, "batched"), timeout=30)


NAMED = "of microbatch ., chunk . has shape .*, planned are"


@pytest.mark.parametrize(
    "mutant, case, complaint",
    [
        (last_microbatch, (2, 1, 4, "batched"), "forward activation to the next stage " + NAMED),
        (forward_position_for_backward, (2, 1, 4, "batched"), "gradient to the previous stage " + NAMED),
        (chunk_ignored, (2, 2, 4, "overlapped"), NAMED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mutant_is_caught(mutant, case, complaint, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        check(scenario(*case), case[-1], monkeypatch)


def test_messages_posted_in_the_other_order_mix_up_equal_shapes_in_silence(monkeypatch):
    """As the stock communicator's batches between two ranks that are each other's next and previous."""
    case = replace(scenario(2, 2, 4, "batched"), steps=1)  # constant T
    check_scenario(case, launch_scenario(case))
    backward_posted_first(monkeypatch)
    with pytest.raises(AssertionError, match="loss .* off the reference"):
        check_scenario(case, launch_scenario(case))
