# SPDX-License-Identifier: Apache-2.0
"""A NaN or an infinity: which step, which microbatch, which documents."""

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn.corpus import Corpus
from megatron_dyn.microbatch import PackedMicrobatch
from megatron_dyn.planning import StepPlan
from megatron_dyn.training.step import StepOutcome, Stepper

MOST_NONFINITE_IN_A_ROW = 10
"""Steps in a row that `--on-nan skip` leaves out before it stops: then it is the weights and not a document."""

_MOST_MICROBATCHES = 4  # described in one message
_MOST_DOCUMENTS = 20  # named in one message; the ids of all are in the plan


class NonFiniteError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite. Raised on every rank; the weights are those of the step before."""


def explain_nonfinite(
    iteration: int,
    outcome: StepOutcome,
    stepper: Stepper,
    plan: StepPlan,
    microbatches: list[PackedMicrobatch],
    corpus: Corpus,
    policy: str,
) -> str:
    """Find the microbatches that a non-finite step came from. Collective over all ranks.

    A bad loss is known from the forward pass. If only the gradient is bad, each microbatch is run again alone.

    Args:
        iteration: The step, counted from 1.
        outcome: What `Stepper.train` returned.
        stepper: Holds the model.
        plan: The step's plan.
        microbatches: This rank's.
        corpus: Names the documents.
        policy: "stop" raises, "skip" returns the message, "give up" raises after too many skips.

    Returns:
        The message, equal on every rank.

    Raises:
        NonFiniteError: With the same message, unless the policy is to skip.
    """
    loss_is_bad = outcome.loss.bad_microbatches > 0
    positions = stepper.bad_positions if loss_is_bad else stepper.find_bad_gradients(microbatches)
    speaks = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    mine = (parallel_state.get_data_parallel_rank(), positions) if speaks else None
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    places = [
        _describe(rank, position, plan.microbatches[rank][position], corpus)
        for rank, found in sorted(entry for entry in everybody if entry)
        for position in found
    ]
    what = f"the loss is {outcome.loss.total}" if loss_is_bad else f"the gradient's norm is {outcome.grad_norm}, though the loss is finite"
    hidden = len(places) - _MOST_MICROBATCHES
    if hidden > 0:
        places = [*places[:_MOST_MICROBATCHES], f"and {hidden} more microbatches"]
    if len(places) > 1 and hidden + _MOST_MICROBATCHES >= plan.stats.microbatches - plan.stats.fillers:
        places.append("that is all of them, so it is the weights or the learning rate rather than a document")
    where = "; ".join(places) or "no single microbatch gives it alone (a sum over microbatches overflowed)"
    message = f"iteration {iteration}: {what}, from {where}. The weights are those of iteration {iteration - 1}."
    if policy == "give up":
        raise NonFiniteError(
            f"{message} It is step {MOST_NONFINITE_IN_A_ROW} in a row that is not finite: the weights are spoilt. Lower --lr, and go on "
            "from a checkpoint before the first of them"
        )
    if policy == "stop":
        raise NonFiniteError(
            f"{message} Look at these documents or lower --lr, and go on from the last checkpoint; --on-nan skip leaves such steps out, "
            f"up to {MOST_NONFINITE_IN_A_ROW - 1} in a row"
        )
    return f"{message} The step was left out (--on-nan skip)"


def _describe(rank: int, position: int, microbatch, corpus: Corpus) -> str:
    ids = [piece.document for piece in microbatch.pieces]
    names = ", ".join(f"{document} ({corpus.describe(document)})" for document in ids[:_MOST_DOCUMENTS])
    more = f" and {len(ids) - _MOST_DOCUMENTS} more" if len(ids) > _MOST_DOCUMENTS else ""
    return f"microbatch {position} of data-parallel rank {rank} (T {microbatch.T}, documents {names}{more})"
