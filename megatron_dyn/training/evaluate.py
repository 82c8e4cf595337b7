# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out documents, exact over whole documents and over ranks.

The validation documents go through the same planner and the same schedule as training, so every data-parallel rank has the
same number of microbatches (some may be fillers) and no rank waits for another that has run out.
"""

import hashlib
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_dyn import device
from megatron_dyn.corpus import Corpus
from megatron_dyn.microbatch import StepStream
from megatron_dyn.pipeline.agreement import Agreement
from megatron_dyn.planning import Planner, TokenBudgetBatchSampler
from megatron_dyn.training.step import Stepper


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one evaluation, the same on every rank."""

    loss: float
    """Sum of token losses / loss tokens (nats); NaN when no evaluated document has a loss token."""

    tokens: int
    """Loss tokens."""

    documents: int
    """Documents evaluated."""

    seconds: float
    """Wall time."""


class Evaluator:
    """Evaluates the same documents each time it is called.

    Args:
        corpus: Validation documents.
        planner: Their planner, in stored order.
        steps: Steps of one evaluation; at most one pass over the documents.
        data_parallel_rank: This rank's part.
        pad_token_id: Token id of padding rows.
        agreement: Compares the plans over the ranks before the first of them runs.
    """

    def __init__(
        self,
        corpus: Corpus,
        planner: Planner,
        *,
        steps: int,
        data_parallel_rank: int,
        pad_token_id: int,
        agreement: Agreement,
    ):
        self._corpus = corpus
        self._planner = planner
        self.steps = min(steps, planner.steps_per_epoch(0))
        self._rank = data_parallel_rank
        self._pad = pad_token_id
        self._agreement = agreement
        self._agreed = False

    def evaluate(self, stepper: Stepper) -> Evaluation:
        """Run the validation documents through the model; dropout is off and no random number is drawn.

        Args:
            stepper: Holds the model's chunks.
        """
        started = time.perf_counter()
        total, tokens, documents = 0.0, 0, 0
        self._agree_once()
        sampler = TokenBudgetBatchSampler(self._planner, data_parallel_rank=self._rank, num_epochs=1)
        where = device.compute_device()
        with _evaluation_mode(stepper.models), torch.no_grad():
            stream = StepStream(sampler, self._corpus, data_parallel_rank=self._rank, pad_token_id=self._pad, device=where)
            with stream:
                for _ in range(self.steps):
                    plan, microbatches = stream.next()
                    loss, _ = stepper.forward_backward(microbatches, forward_only=True)
                    total += loss.total
                    tokens += loss.tokens
                    documents += plan.num_documents
        return Evaluation(
            loss=total / tokens if tokens else float("nan"),
            tokens=tokens,
            documents=documents,
            seconds=time.perf_counter() - started,
        )

    def _agree_once(self) -> None:
        """Validation plans never change, so one comparison serves all evaluations."""
        if not self._agreed:
            digests = hashlib.sha256()
            for step in range(self.steps):
                digests.update(self._planner.plan(step).digest.encode())
            self._agreement.check("the plan of the evaluation", digests.hexdigest())
            self._agreed = True


@contextmanager
def _evaluation_mode(models: list):
    """Dropout off; parameters that the distributed optimizer still gathers are brought in first."""
    with parameters_gathered(models):
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for model in models:
                model.train()


@contextmanager
def parameters_gathered(models: list):
    """Have complete parameters while they are read outside a training step (`--overlap-param-gather` gathers them late)."""
    overlapped = [model for model in models if model.ddp_config.overlap_param_gather]
    for model in overlapped:
        model.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for model in overlapped:
            model.enable_forward_pre_hook()
