# SPDX-License-Identifier: Apache-2.0
"""A whole GPT trains the same with communication beside its matrix products as without, T varying, in every schedule.

Each rank trains a scenario of the matrix twice, without overlap and with it. The second run is held against the first, and against the
reference that reads one unpadded document at a time. Mutants break the rule that a layer call sets the shape from its own input.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import trained_steps
from launch import launch
from layer_pairs import Poison
from reference import GPT2, LLAMA, largest_difference, make_documents
from trained_steps import RankStep, Run, Scenario, check_scenario

import megatron_dyn.layers.overlap as overlap
import megatron_dyn.userbuffers.reference_exchanges as exchanges
from megatron_dyn import userbuffers
from megatron_dyn.layers.overlap import OverlapColumnParallelLinear, OverlapRowParallelLinear
from megatron_dyn.training.step import Stepper

TOLERANCE = 1e-6  # of gradients, largest difference / largest value; what adding up in another order costs
# Each document is a microbatch of its own, so that T is anything from TP to the budget; the buffers are larger still.
ALONE = dict(documents=make_documents([3, 16, 14, 6, 12, 8, 1, 16, 9, 2, 14, 12]), budget=16, batch=6, steps=2)
ALONE |= dict(packing={"max_documents_per_microbatch": 1})
CAPACITY = 24
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
CORE_ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RINGS = {name: {"method": "ring_exchange"} for name in ("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad")}


def scenario(gpt=LLAMA, **topology) -> Scenario:
    return Scenario(gpt=gpt, tp=2, sp=True, **(ALONE | topology))


@dataclasses.dataclass(frozen=True)
class Case:
    scenario: Scenario
    flags: dict = dataclasses.field(default_factory=dict)
    table: dict = dataclasses.field(default_factory=dict)


CASES = {
    "TP2 PP2": Case(scenario(pp=2)),
    "TP2 PP2, gpt2, full recompute": Case(scenario(GPT2, pp=2, model=FULL)),
    "TP2 PP2, selective recompute, rings": Case(scenario(pp=2, model=SELECTIVE), dict(tp_comm_overlap_rs_dgrad=True), RINGS),
    "TP2 PP2 VPP2, full recompute": Case(scenario(pp=2, vpp=2, model=FULL)),
    "TP2 PP2 VPP2, gpt2, attention recomputed, rings": Case(
        scenario(GPT2, pp=2, vpp=2, model=CORE_ATTENTION), dict(tp_comm_overlap_rs_dgrad=True), RINGS
    ),
}


def with_overlap(case: Case) -> list[RankStep]:
    """Train; an evaluation of other T comes between the steps."""
    configured = trained_steps.transformer_config
    with mock.patch.object(trained_steps, "transformer_config", lambda *a, **k: configured(*a, **k, tp_comm_overlap=True, **case.flags)):
        run = Run(case.scenario)
    layers = [module for chunk in run.chunks for module in chunk.modules() if getattr(module, "overlap", None) is not None]
    assert len(layers) == 4 * sum(len(chunk.decoder.layers) for chunk in run.chunks)
    assert {type(layer) for layer in layers} == {OverlapColumnParallelLinear, OverlapRowParallelLinear}
    shape = [CAPACITY, case.scenario.gpt.hidden]
    poison = Poison(userbuffers.initialize_ub(shape, case.scenario.tp, dtype=torch.float32, ub_cfgs=case.table, backend="reference"))
    steps = []
    for step in range(case.scenario.steps):
        steps.append(run.train(step))
        if step < case.scenario.steps - 1:
            Stepper(run.models).forward_backward(run.microbatches(step + 1)[1], forward_only=True)
    poison.check()
    userbuffers.destroy_ub()
    return steps


def both(rank: int, world: int, case: Case) -> tuple[list[RankStep], list[RankStep]]:
    plain = Run(case.scenario)
    return [plain.train(step) for step in range(case.scenario.steps)], with_overlap(case)


def check_case(case: Case, *, timeout: float = 60.0) -> None:
    results = launch(case.scenario.world, both, case, timeout=timeout)
    for plain, overlapped in results:
        assert all(len(set(step.planned_T)) >= 5 for step in plain) and min(plain[1].planned_T) == case.scenario.tp
        for expected, found in zip(plain, overlapped, strict=True):
            off = abs(found.loss - expected.loss) / expected.loss
            assert off <= TOLERANCE, f"loss is {off:.1e} off the run without overlap"
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in found.gradients.items():
                off = largest_difference(gradient, expected.gradients[name])
                assert off <= TOLERANCE, f"gradient of {name} is {off:.1e} off the run without overlap"
    check_scenario(case.scenario, [overlapped for _, overlapped in results])


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_without_overlap(name):
    check_case(CASES[name])


# --- mutants -----------------------------------------------------------------------------------------------------------


def shape_set_only_in_forward(monkeypatch):
    """A backward runs with the shape of the forward before it, which is another microbatch's."""
    begin = overlap._begin

    def forward_only(layer, rows, **used):
        if "fprop" in used:
            return begin(layer, rows, **used)
        return {what: userbuffers.get_ub(f"{layer.name}_{what}") for what, is_used in used.items() if is_used}

    monkeypatch.setattr(overlap, "_begin", forward_only)


def shape_of_the_last_microbatch(monkeypatch):
    """T is noted where a microbatch enters the model, and every layer call believes the note."""
    begin, forward, last = overlap._begin, trained_steps.ThdAttention.forward, {}

    def noting(self, query, *args, **kwargs):
        last["T"] = query.size(0)
        return forward(self, query, *args, **kwargs)

    def believing(layer, rows, **used):
        if "fprop" in used and layer.name == "qkv":  # before the attention that notes it
            last["T"] = rows
        return begin(layer, last["T"], **used)

    monkeypatch.setattr(trained_steps.ThdAttention, "forward", noting)
    monkeypatch.setattr(overlap, "_begin", believing)


def capacity_for_counts(monkeypatch):
    """Views of the buffers begin and end where they would at capacity."""
    view = exchanges.ReferenceCommunicator._view

    def at_capacity(self, first_row, rows):
        return view(self, *(count * self.capacity[0] // self.rows for count in (first_row, rows)))

    monkeypatch.setattr(exchanges.ReferenceCommunicator, "_view", at_capacity)


MUTANTS = {
    shape_set_only_in_forward: "peers would wait for other rows",
    shape_of_the_last_microbatch: "peers would wait for other rows",
    capacity_for_counts: "The size of tensor a",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=MUTANTS[mutant]):
        check_case(CASES["TP2 PP2"])
