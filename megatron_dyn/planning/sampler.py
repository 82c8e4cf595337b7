# SPDX-License-Identifier: Apache-2.0
"""The position in training: an iterator over plans that can be saved and restored."""

from megatron_dyn.planning.config import PlanError
from megatron_dyn.planning.plan import MicrobatchPlan, StepPlan
from megatron_dyn.planning.planner import Planner

STATE_VERSION = 1
POSITION = ("step", "epoch", "epoch_first_step")
TOTALS = (
    "documents", "tokens", "loss_tokens", "split_documents", "truncated_documents", "truncated_tokens",
    "dropped_documents", "dropped_tokens", "empty_documents", "drop_last_documents",
)


class TokenBudgetBatchSampler:
    """Iterates over StepPlans, endlessly or for `num_epochs`.

    The state is a few integers and a fingerprint. Restoring is strict about everything that decides which tokens a step
    trains on, and free about the rest: data-parallel size, budget, alignment and cost model may change (elastic). Nothing
    is replayed: any step is planned directly.

    Args:
        planner: makes the plans.
        data_parallel_rank: the rank whose microbatches `local_microbatches` returns; the plans are equal on all ranks.
        num_epochs: stop after this many epochs; endless when None.
    """

    def __init__(self, planner: Planner, data_parallel_rank: int = 0, num_epochs: int | None = None):
        size = planner.config.data_parallel_size
        if not 0 <= data_parallel_rank < size:
            raise PlanError(
                f"data_parallel_rank={data_parallel_rank} is not in 0..{size - 1}: plan and process groups disagree about the "
                "data-parallel size; make the planner with the size of the group"
            )
        if num_epochs is not None and num_epochs < 0:
            raise PlanError(f"num_epochs={num_epochs} must be at least 0, or None for no end")
        self.planner = planner
        self.data_parallel_rank = data_parallel_rank
        self.num_epochs = num_epochs
        self.step = 0
        """The next step to hand out."""
        self.totals = dict.fromkeys(TOTALS, 0)
        """Sums of the step statistics over all steps handed out (kept when restored)."""

    def __iter__(self) -> "TokenBudgetBatchSampler":
        return self

    def __next__(self) -> StepPlan:
        if self.num_epochs is not None and self.planner.epoch_of(self.step) >= self.num_epochs:
            raise StopIteration
        plan = self.planner.plan(self.step)
        self.step += 1
        for name in TOTALS:
            self.totals[name] += getattr(plan.stats, name)
        return plan

    def __len__(self) -> int:
        """Steps of all epochs, those already handed out included.

        Raises:
            TypeError: the sampler is endless.
        """
        if self.num_epochs is None:
            raise TypeError("an endless sampler has no length: give num_epochs")
        return self.planner.first_step_of(self.num_epochs)

    def local_microbatches(self, plan: StepPlan) -> tuple[MicrobatchPlan, ...]:
        """The microbatches of this rank."""
        return plan.microbatches[self.data_parallel_rank]

    def state_dict(self) -> dict:
        """JSON-able position: the next step is the first one that has not been handed out."""
        epoch = self.planner.epoch_of(self.step)
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "epoch": epoch,
            "epoch_first_step": self.planner.first_step_of(epoch),
            "fingerprint": self.planner.fingerprint,
            **self.planner.config.data_order(),
            "totals": dict(self.totals),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved.

        Raises:
            PlanError: the state lacks something, is of another version, or belongs to another data order. Nothing changes then.
        """
        order = self.planner.config.data_order()
        own = {"version": STATE_VERSION, "fingerprint": self.planner.fingerprint, **order}
        if set(state) != {*own, *POSITION, "totals"} or not isinstance(state["totals"], dict) or set(state["totals"]) != set(TOTALS):
            raise PlanError(
                f"not a state of this sampler: it needs {', '.join([*own, *POSITION, 'totals'])} and, in totals, "
                f"{', '.join(TOTALS)}, nothing else; got {state}; load the checkpoint with the version that wrote it"
            )
        told = {"fingerprint": "the documents, by their fingerprint"}
        different = [f"{told.get(name, name)} (saved {state[name]!r}, now {value!r})" for name, value in own.items() if state[name] != value]
        if different:
            raise PlanError(
                f"the saved state belongs to another data order: {'; '.join(different)}. Going on would repeat some documents "
                "and skip others: restore the setting (of the documents: data path and split)"
            )
        step, epoch, first_step = (state[name] for name in POSITION)
        integers = all(type(number) is int and number >= 0 for number in (step, epoch, first_step, *state["totals"].values()))
        if not integers or not 0 <= step - first_step < self.planner.steps_per_epoch(epoch):
            raise PlanError(f"the saved position is damaged: {state}; take an older checkpoint")
        self.planner.remember_epoch(epoch, first_step)
        self.step = state["step"]
        self.totals = dict(state["totals"])
