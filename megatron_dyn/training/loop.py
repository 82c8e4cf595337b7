# SPDX-License-Identifier: Apache-2.0
"""The training loop: plan, agree, compute, update, report; evaluate and save in between.

What happens in an iteration, on every rank alike:

    1. the next StepPlan and its tensors come from the background (made while the step before was computed)
    2. all ranks have compared it and told each other of failures and of SIGTERM - in the background as well, before the first kernel
    3. Megatron's schedule runs the microbatches, each with its own T; gradients are divided once by the step's loss tokens
    4. the optimizer updates, unless the loss or the gradient is not finite
"""

import time

import torch

from megatron_dyn import device
from megatron_dyn.corpus import Corpus
from megatron_dyn.microbatch import StepStream
from megatron_dyn.microbatch.shared_tokens import TokenBroadcast
from megatron_dyn.pipeline.agreement import AgreementError, LostRankError, losing_a_rank_during
from megatron_dyn.pipeline.plan_agreement import PlanAgreement
from megatron_dyn.planning import Planner, StepPlan, TokenBudgetBatchSampler
from megatron_dyn.training.agreed_steps import AgreedSteps
from megatron_dyn.training.bubble import BubbleMeter
from megatron_dyn.training.checkpoint import RUN, CheckpointManager
from megatron_dyn.training.evaluate import Evaluator, parameters_gathered
from megatron_dyn.training.metrics import StepRecord
from megatron_dyn.training.nonfinite import MOST_NONFINITE_IN_A_ROW, explain_nonfinite
from megatron_dyn.training.progress import PROGRESS
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.run_log import RunLog
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest


class Trainer:
    """Holds the parts of a run and drives them to the last iteration.

    Args:
        run: Settings.
        stepper: Model, optimizer and scheduler.
        corpus: Training documents.
        planner: Their planner.
        sampler: Position in the documents.
        evaluator: Held-out documents, or None.
        checkpoints: Where the state is saved, or None.
        agreement: Meets all ranks for each step, in a group of its own.
        log: What is shown and written.
        data_parallel_rank: This rank's part of each step.
        pad_token_id: Token id of padding rows.
        progress: Counters of an earlier run that this one continues (`iteration`, `consumed_tokens`, `consumed_documents`,
            and `evaluated_iteration`, the last one whose evaluation was finished).
        tokens: Shares the tokens that one rank reads; None where every rank reads.
    """

    def __init__(
        self,
        run: RunConfig,
        *,
        stepper: Stepper,
        corpus: Corpus,
        planner: Planner,
        sampler: TokenBudgetBatchSampler,
        evaluator: Evaluator | None,
        checkpoints: CheckpointManager | None,
        agreement: PlanAgreement,
        log: RunLog,
        data_parallel_rank: int,
        pad_token_id: int,
        progress: dict[str, int],
        tokens: TokenBroadcast | None = None,
    ):
        self.run = run
        self.stepper = stepper
        self.corpus = corpus
        self.planner = planner
        self.evaluator = evaluator
        self.checkpoints = checkpoints
        self._agreement = agreement
        self._tokens = tokens
        self.log = log
        self.iteration = progress["iteration"]
        self.consumed_tokens = progress["consumed_tokens"]
        self.consumed_documents = progress["consumed_documents"]
        self._saved_iteration = self.iteration
        self._evaluated_iteration = progress.get("evaluated_iteration")
        self._nonfinite_in_a_row = 0
        self._bubble = BubbleMeter(run, first=log.enabled)
        self._stream = StepStream(
            sampler,
            corpus,
            data_parallel_rank=data_parallel_rank,
            pad_token_id=pad_token_id,
            device=device.compute_device(),
            prefetch_steps=run.data.prefetch_steps,
            timeout_secs=run.parallel.data_timeout_secs,
            plans_only=tokens is not None and not tokens.reads,
        )
        self._position = self._stream.state_dict()  # of the steps done: a step handed out may still be given up

    def train(self, stop: StopRequest) -> None:
        """Go on to `--train-iters`, or until all ranks agree to stop. The state is saved at the end.

        Args:
            stop: Whether this rank was asked to stop.

        Raises:
            AgreementError: On every rank: plans differ or a rank failed.
            NonFiniteError: On every rank, see `--on-nan`.
        """
        wanted = self.run.training
        steps = AgreedSteps(
            self._stream, self._agreement, name=lambda iteration: f"step {iteration}", first=self.iteration + 1, stop=stop, tokens=self._tokens
        )
        with self._stream, steps:
            for model in self.stepper.models:
                model.train()
            while self.iteration < wanted.train_iters:
                stopped = self._iterate(steps)
                if not stopped and wanted.eval_interval and self.iteration % wanted.eval_interval == 0:
                    stopped = self._evaluate(stop)
                if stopped:
                    self.log.notice(f"asked to stop: leaving after iteration {self.iteration}")
                    break
                if self.run.checkpoint.save_interval and self.iteration % self.run.checkpoint.save_interval == 0:
                    self._save()
                if self._leaves_after(self.iteration) and self.iteration < wanted.train_iters:
                    self.log.notice(f"leaving after iteration {self.iteration}, as --exit-interval {wanted.exit_interval} asks")
                    break
            else:
                self._evaluate(stop)
            self._save()

    def _leaves_after(self, iteration: int) -> bool:
        """Whether no other step follows in this process: every rank knows it alike."""
        wanted = self.run.training
        return iteration >= wanted.train_iters or bool(wanted.exit_interval and iteration % wanted.exit_interval == 0)

    def _iterate(self, steps: AgreedSteps) -> bool:
        """One iteration; True (and nothing done) when the ranks agreed to stop instead."""
        started = time.perf_counter()
        iteration = self.iteration + 1
        PROGRESS.begin_step(iteration)
        agreed = steps.next(more=not self._leaves_after(iteration))
        if agreed is None:
            return True
        plan, microbatches = agreed
        PROGRESS.begin_step(iteration, len(microbatches))
        data_time = steps.last_data_wait_secs
        loss_tokens = plan.num_loss_tokens
        learning_rate = self.stepper.learning_rate
        outcome = None
        if loss_tokens == 0:
            self.stepper.skip()
            self.log.warning(f"iteration {iteration} has no loss token ({plan.num_documents} documents): skipped, the weights are unchanged")
        else:
            with losing_a_rank_during(f"step {iteration}"):
                outcome = self.stepper.train(microbatches, loss_tokens=loss_tokens)
            self._nonfinite_in_a_row = 0 if outcome.updated else self._nonfinite_in_a_row + 1
            if not outcome.updated:
                gives_up = self._nonfinite_in_a_row >= MOST_NONFINITE_IN_A_ROW
                policy = "give up" if gives_up else self.run.training.on_nan
                self.log.warning(explain_nonfinite(iteration, outcome, self.stepper, plan, microbatches, self.corpus, policy))
        # Nobody waits for the update on the device: the next step's kernels queue up behind it. So a step's time ends where the host is
        # done with it, and what the device still does then counts in the next one.
        if self._bubble.measures:
            device.synchronize()
        PROGRESS.end_step()
        self.iteration = iteration
        self._position = self._stream.state_dict()
        self.consumed_tokens += plan.stats.tokens
        self.consumed_documents += plan.num_documents
        self.log.step(self._record(plan, outcome, learning_rate, time.perf_counter() - started, data_time), plan)
        return False

    def _record(self, plan: StepPlan, outcome, learning_rate: float, step_time: float, data_time: float) -> StepRecord:
        bubble = self._bubble.of_step(plan, self.stepper, iteration=self.iteration, step_time=step_time, computed=outcome is not None)
        changed = [text for override in self._position["overrides"] if override["step"] == plan.step for text in override["changed"]]
        return StepRecord.from_plan(
            plan,
            iteration=self.iteration,
            lm_loss=outcome.loss.mean if outcome else None,
            grad_norm=outcome.grad_norm if outcome else None,
            learning_rate=learning_rate,
            step_time=step_time,
            data_time=data_time,
            max_tokens_per_microbatch=self.planner.config.max_tokens_per_microbatch,
            capacity=self.planner.config.capacity,
            consumed_tokens=self.consumed_tokens,
            consumed_documents=self.consumed_documents,
            skipped=outcome is None or not outcome.updated,
            extra=bubble | ({"data-mismatch-overridden": changed} if changed else {}),
        )

    def _evaluate(self, stop: StopRequest) -> bool:
        """Evaluate unless that was done; True when the ranks agreed to stop instead."""
        if self.evaluator is None or self._evaluated_iteration == self.iteration:
            return False
        try:
            result = self.evaluator.evaluate(self.stepper, stop)
        except LostRankError:
            raise
        except AgreementError:  # raised on every rank: the steps done are worth keeping
            self._save()
            raise
        if result is None:
            return True
        self._evaluated_iteration = self.iteration
        if result.loss is None:
            self.log.warning(f"the {result.documents} validation documents after iteration {self.iteration} hold no loss token: no validation loss")
        self.log.validation(
            iteration=self.iteration, loss=result.loss, tokens=result.tokens, documents=result.documents, seconds=result.seconds
        )
        return False

    def _save(self) -> None:
        if self.checkpoints is None or self.run.checkpoint.save is None or self._saved_iteration == self.iteration:
            return
        if self._nonfinite_in_a_row:
            self.log.warning(f"not saved after iteration {self.iteration}: its loss or gradient was not finite, so the weights may be spoilt")
            return
        started = time.perf_counter()
        PROGRESS.mark("saving", patient=True)
        with parameters_gathered(self.stepper.models), torch.no_grad():
            path = self.checkpoints.save(
                self.iteration,
                models=self.stepper.models,
                optimizer=self.stepper.optimizer,
                scheduler=self.stepper.scheduler,
                sampler_state=self._position,
                extra={
                    "consumed_tokens": self.consumed_tokens,
                    "consumed_documents": self.consumed_documents,
                    "evaluated_iteration": self._evaluated_iteration,
                    RUN: self.run.as_dict(),
                },
            )
        self._saved_iteration = self.iteration
        self.log.checkpoint(iteration=self.iteration, path=path, seconds=time.perf_counter() - started)
