# SPDX-License-Identifier: Apache-2.0
"""The position in training: an iterator over plans that can be saved and restored."""

from megatron_dyn.planning.config import PlanError
from megatron_dyn.planning.plan import MicrobatchPlan, StepPlan
from megatron_dyn.planning.planner import Planner, StepPosition

STATE_VERSION = 2
"""Version 1 belonged to another definition of the shuffle."""
POSITION = ("epoch", "epoch_first_step", "epoch_documents", "epoch_window")
"""In the state: the fields of StepPosition."""
TOTALS = (
    "documents", "tokens", "loss_tokens", "split_documents", "truncated_documents", "truncated_tokens",
    "dropped_documents", "dropped_tokens", "empty_documents", "drop_last_documents",
)


class TokenBudgetBatchSampler:
    """Iterates over StepPlans, endlessly or for `num_epochs`.

    The state is a few integers, a fingerprint and the settings of the data order. Restoring is strict about everything that
    decides which tokens a step trains on, and free about the rest: data-parallel size, budget, alignment and cost model may
    change (elastic). Nothing is replayed: the state says where in its epoch the next step begins.

    Args:
        planner: makes the plans.
        data_parallel_rank: the rank whose microbatches `local_microbatches` returns; the plans are equal on all ranks.
        num_epochs: stop after this many epochs; endless when None.
        override_data_mismatch: restore a state of another data order all the same, at the saved step number, and record it.
    """

    def __init__(
        self, planner: Planner, data_parallel_rank: int = 0, num_epochs: int | None = None, *, override_data_mismatch: bool = False
    ):
        size = planner.config.data_parallel_size
        for name, value in (("data_parallel_rank", data_parallel_rank), ("num_epochs", 0 if num_epochs is None else num_epochs)):
            if not hasattr(value, "__index__") or isinstance(value, bool):
                raise PlanError(f"{name} must be an integer, got {value!r}")
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
        self.override_data_mismatch = override_data_mismatch
        self.step = 0
        """The next step to hand out."""
        self.totals = dict.fromkeys(TOTALS, 0)
        """Sums of the step statistics over all steps handed out (kept when restored)."""
        self.overrides: list[dict] = []
        """Overridden changes of the data order, `{"step": first step in the new order, "changed": [texts]}` (kept when restored)."""

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
        return {
            **self._own(),
            "step": self.step,
            **dict(zip(POSITION, self.planner.position_of(self.step))),
            "totals": dict(self.totals),
            "overrides": [{"step": entry["step"], "changed": list(entry["changed"])} for entry in self.overrides],
        }

    def _own(self) -> dict:
        """What a state must have in common with this sampler."""
        counts = self.planner.counts
        return {
            "version": STATE_VERSION,
            "fingerprint": self.planner.fingerprint,
            "corpus_documents": counts.documents,
            "corpus_tokens": counts.tokens,
            **self.planner.config.data_order(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved.

        A state of another data order is refused unless `override_data_mismatch`. Then the step number goes on in this sampler's own
        order (with `global_batch_tokens` its place is found by a scan from the begin), and `overrides` says so from there on.

        Raises:
            PlanError: the state lacks something, is of another version, or belongs to another data order. Nothing changes then.
        """
        if not isinstance(state, dict):
            raise PlanError(f"not a state of this sampler: {type(state).__name__} instead of a dict; pass what state_dict() gave")
        own = self._own()
        changed = differences(state, own)
        if not changed or "version" not in state:
            self._require_whole(state, {*own, "step", *POSITION, "totals", "overrides"})
        if changed and not self.override_data_mismatch:
            raise PlanError(
                f"the saved state belongs to another data order: {'; '.join(changed)}. Going on would repeat some documents and skip "
                "others: restore the setting, or go on from the saved step number in the new order with --override-data-mismatch"
            )
        totals, overrides = state.get("totals"), state.get("overrides", [])
        self._require_integers(state, [state.get("step"), *(totals.values() if isinstance(totals, dict) else [None])])
        if not isinstance(overrides, list) or not all(isinstance(entry, dict) and set(entry) == {"step", "changed"} for entry in overrides):
            raise PlanError(f"the saved overrides are damaged: {overrides!r}; take an older checkpoint")
        step = state["step"]
        if changed:
            overrides = [*overrides, {"step": step, "changed": changed}]
            self.planner.position_of(step)  # a scan, if one is needed, belongs to restoring and not to the first step
        else:
            position = [state[name] for name in POSITION]
            self._require_integers(state, position)
            self.planner.remember(step, StepPosition(*position))
        self.step = step
        self.totals = {name: totals.get(name, 0) for name in TOTALS}
        self.overrides = [dict(entry) for entry in overrides]

    @staticmethod
    def _require_whole(state: dict, names: set[str]) -> None:
        totals = state.get("totals")
        if set(state) != names or not isinstance(totals, dict) or set(totals) != set(TOTALS) or not isinstance(state["overrides"], list):
            raise PlanError(
                f"not a state of this sampler: it needs {', '.join(sorted(names))} and, in totals, {', '.join(TOTALS)}, nothing else; "
                f"got {state}; load the checkpoint with the version that wrote it"
            )

    @staticmethod
    def _require_integers(state: dict, values: list) -> None:
        if not all(type(value) is int and value >= 0 for value in values):
            raise PlanError(f"the saved position is damaged: {state}; take an older checkpoint")


def differences(state: dict, own: dict) -> list[str]:
    """What a saved state and a sampler differ in, in words of flags; empty when they share one data order.

    Args:
        state: as saved; what it lacks is not compared.
        own: the sampler's settings and corpus by the names of the state.
    """
    texts = []
    if state.get("version") != own["version"]:
        texts.append(f"the definition of the data order, version {own['version']} (saved {state.get('version')})")
    corpus = ("fingerprint", "corpus_documents", "corpus_tokens")
    if any(name in state and state[name] != own[name] for name in corpus):
        now, before = (
            f"{of.get('corpus_documents', 'unknown')} documents, {of.get('corpus_tokens', 'unknown')} tokens, "
            f"fingerprint {of.get('fingerprint')}"
            for of in (own, state)
        )
        texts.append(f"--data-path or --split: {now} (saved {before})")
    for name, value in own.items():
        saved = state.get(name, value)
        # Where they matter on one side only, another setting differs too and says so.
        matters = name not in ("max_tokens_per_microbatch", "length_window") or None not in (saved, value)
        if name not in (*corpus, "version") and matters and saved != value:
            texts.append(f"{_flag(name, value)} (saved {_value(saved)})")
    return texts


def _flag(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')} {_value(value)}"


def _value(value: object) -> str:
    return {None: "not given", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)
