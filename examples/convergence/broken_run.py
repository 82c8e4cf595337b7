# SPDX-License-Identifier: Apache-2.0
"""Negative controls: `pretrain_gpt_thd.py` with one known fault, to see that a comparison finds it.

    python examples/convergence/broken_run.py --break normaliser FLAGS OF pretrain_gpt_thd.py
    python examples/convergence/broken_run.py --break attention ...

normaliser: the step's loss is the mean over microbatches of their mean losses, so tokens of short microbatches weigh more.
attention: tokens see the documents packed before their own.

Both train, and the loss falls as nicely as ever: nothing but a comparison tells.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core import parallel_state

from megatron_dyn.microbatch import stream
from megatron_dyn.training import step
from megatron_dyn.training.launch import main as pretrain

FAULTS = ("normaliser", "attention")


@contextmanager
def broken(fault: str) -> Iterator[None]:
    """Runs started inside have the fault.

    Args:
        fault: one of `FAULTS`.
    """
    with _mean_of_means() if fault == "normaliser" else _one_segment():
        yield


@contextmanager
def _mean_of_means() -> Iterator[None]:
    tokens_each = [1.0]  # loss tokens / microbatches of the step at hand
    real_train, real_forward = step.Stepper.train, step.forward_step

    def train(self, microbatches, *, loss_tokens, **more):
        tokens_each[0] = loss_tokens / (len(microbatches) * parallel_state.get_data_parallel_world_size())
        return real_train(self, microbatches, loss_tokens=loss_tokens, **more)

    def forward_step(data_iterator, model):
        output, sum_losses = real_forward(data_iterator, model)

        def weighted(token_losses):
            total, tokens, report = sum_losses(token_losses)
            if not torch.is_grad_enabled():  # an evaluation: its loss is that of the weights
                return total, tokens, report
            weight = tokens_each[0] / max(int(tokens), 1)
            return total * weight, tokens, {**report, "total": report["total"] * weight}

        return output, weighted

    with mock.patch.object(step.Stepper, "train", train), mock.patch.object(step, "forward_step", forward_step):
        yield


@contextmanager
def _one_segment() -> Iterator[None]:
    real = stream.build_microbatch

    def build(plan, *arguments, **options):
        built = real(plan, *arguments, **options)
        real_rows, rows = (torch.tensor([0, end], dtype=torch.int32) for end in (plan.num_tokens or plan.T, plan.T))
        packed = dataclasses.replace(
            built.packed_seq_params, cu_seqlens_q=real_rows, cu_seqlens_kv=real_rows, cu_seqlens_q_padded=rows, cu_seqlens_kv_padded=rows,
            max_seqlen_q=plan.T, max_seqlen_kv=plan.T,
        )  # fmt: skip
        return dataclasses.replace(built, packed_seq_params=packed)

    with mock.patch.object(stream, "build_microbatch", build):
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--break", dest="fault", choices=FAULTS, required=True)
    own, flags = parser.parse_known_args()
    with broken(own.fault):
        return pretrain(flags)


if __name__ == "__main__":
    sys.exit(main())
