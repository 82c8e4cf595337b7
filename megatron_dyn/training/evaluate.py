# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out documents, exact over whole documents and over ranks.

The validation documents go through the same planner and the same schedule as training, so every data-parallel rank has the
same number of microbatches (some may be fillers) and no rank waits for another that has run out.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_dyn import device
from megatron_dyn.corpus import Corpus
from megatron_dyn.microbatch import StepStream
from megatron_dyn.microbatch.shared_tokens import TokenBroadcast
from megatron_dyn.pipeline.agreement import losing_a_rank_during
from megatron_dyn.pipeline.plan_agreement import PlanAgreement
from megatron_dyn.planning import Planner, TokenBudgetBatchSampler
from megatron_dyn.training.agreed_steps import AgreedSteps
from megatron_dyn.training.progress import PROGRESS
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of one evaluation, the same on every rank."""

    loss: float | None
    """Sum of token losses / loss tokens (nats); None when no evaluated document has a loss token."""

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
        agreement: Compares each step's plan over the ranks before it runs, as in training; in a group of its own, because the
            training steps that follow are agreed on meanwhile.
        timeout_secs: Longest wait for a step's data.
        tokens: Shares the tokens that one rank reads, in a group of its own too; None where every rank reads.
    """

    def __init__(
        self,
        corpus: Corpus,
        planner: Planner,
        *,
        steps: int,
        data_parallel_rank: int,
        pad_token_id: int,
        agreement: PlanAgreement,
        timeout_secs: float = 300.0,
        tokens: TokenBroadcast | None = None,
    ):
        self._corpus = corpus
        self._planner = planner
        self.steps = planner.steps_per_epoch(0, at_most=steps)
        self._rank = data_parallel_rank
        self._pad = pad_token_id
        self._agreement = agreement
        self._timeout_secs = timeout_secs
        self._tokens = tokens

    def evaluate(self, stepper: Stepper, stop: StopRequest | None = None) -> Evaluation | None:
        """Run the validation documents through the model; dropout is off and no random number is drawn.

        Args:
            stepper: Holds the model's chunks.
            stop: Looked at before each step.

        Returns:
            The result, or None where a rank was asked to stop meanwhile.

        Raises:
            AgreementError: On every rank, if one of them cannot make a step or has another plan.
        """
        started = time.perf_counter()
        total, tokens, documents = 0.0, 0, 0
        sampler = TokenBudgetBatchSampler(self._planner, data_parallel_rank=self._rank, num_epochs=1)
        where = device.compute_device()
        with _evaluation_mode(stepper.models), torch.no_grad():
            stream = StepStream(
                sampler,
                self._corpus,
                data_parallel_rank=self._rank,
                pad_token_id=self._pad,
                device=where,
                timeout_secs=self._timeout_secs,
                plans_only=self._tokens is not None and not self._tokens.reads,
            )
            steps = AgreedSteps(
                stream, self._agreement, name=lambda step: f"step {step} of the evaluation", stop=stop, tokens=self._tokens
            )
            with stream, steps:
                for step in range(self.steps):
                    PROGRESS.mark("evaluating")
                    agreed = steps.next(more=step + 1 < self.steps)
                    if agreed is None:
                        return None
                    plan, microbatches = agreed
                    with losing_a_rank_during(f"step {step + 1} of the evaluation"):
                        loss, _ = stepper.forward_backward(microbatches, forward_only=True)
                    total += loss.total
                    tokens += loss.tokens
                    documents += plan.num_documents
        return Evaluation(
            loss=total / tokens if tokens else None,
            tokens=tokens,
            documents=documents,
            seconds=time.perf_counter() - started,
        )


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
