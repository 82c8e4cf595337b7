# SPDX-License-Identifier: Apache-2.0
"""A training step waits for the device in one place: where Megatron reads the norm of the gradient. What the loss needs has come by then."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dyn import device
from megatron_dyn.training.step import Stepper, _Totals


@pytest.fixture
def order(monkeypatch):
    """What happened, in order, in the steps of `stepper`."""
    seen = []

    class Copy(device.HostCopy):
        def __init__(self, tensor):
            seen.append("copy started")
            super().__init__(tensor)

        def read(self):
            seen.append("copy read")
            return super().read()

    monkeypatch.setattr(device, "HostCopy", Copy)
    return seen


def stepper(order, *, totals):
    """A stepper whose schedule yields these totals (sum of losses, loss tokens, bad microbatches)."""
    made = Stepper.__new__(Stepper)
    made.models, made.bad_positions = [], []
    made._start = lambda microbatches, forward_only: _Totals(torch.tensor(totals, dtype=torch.float64), torch.tensor([True, totals[2] == 0]))
    made.optimizer = SimpleNamespace(
        zero_grad=lambda: None,
        prepare_grads=lambda: order.append("gradients ready"),
        get_grad_norm=lambda: order.append("norm") or 1.5,
        chained_optimizers=[],
        step_with_ready_grads=lambda: order.append("update"),
    )
    made.scheduler = SimpleNamespace(step=lambda increment: None)
    return made


def test_the_loss_is_read_after_the_norm_and_before_the_update(order):
    outcome = stepper(order, totals=[12.0, 4.0, 0.0]).train([], loss_tokens=4)
    assert order == ["copy started", "gradients ready", "norm", "copy read", "update"]
    assert (outcome.loss.mean, outcome.grad_norm, outcome.updated) == (3.0, 1.5, True)


def test_a_loss_that_is_not_finite_is_known_before_the_update(order):
    made = stepper(order, totals=[float("nan"), 4.0, 1.0])
    assert not made.train([], loss_tokens=4).updated
    assert "update" not in order and made.bad_positions == [1]


def test_other_tokens_than_planned_are_known_before_the_update(order):
    with pytest.raises(RuntimeError, match="hold 4 loss tokens, its plan 5"):
        stepper(order, totals=[12.0, 4.0, 0.0]).train([], loss_tokens=5)
    assert "update" not in order


def test_a_copy_to_the_host_keeps_what_was_there_when_it_began():
    tensor = torch.arange(3.0)
    copy = device.HostCopy(tensor)
    tensor.zero_()
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
