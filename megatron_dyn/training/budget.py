# SPDX-License-Identifier: Apache-2.0
"""`--max-tokens-per-microbatch auto`: from a few measured microbatches to the largest budget that fits on every rank.

The most memory that a microbatch of T tokens takes is the largest of a few straight lines in T, so it bends upwards only:

- between two measured T the straight line between them is never too low, so a budget taken from it fits;
- beyond them the line may be too low, so what it says is measured before it is believed.

All ranks take part in every round and go on with the least of what they propose: the first and the last stage of a pipeline, and cards that
hold something else already, have room for different budgets.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_dyn.planning.config import INT32_MAX
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.memory import GIB, MARGIN, rounded_down

FIRST_TOKENS = 1024
"""T of the first microbatch that is measured; the second has twice as many."""
MOST_ROUNDS = 12
NEAR = 0.02
"""A budget that is so much larger is not worth another round."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one rank may fill."""

    memory: float
    """Bytes that PyTorch's allocator and the UserBuffers may take."""
    buffer_bytes: float = 0.0
    """UserBuffers per token of the budget: the measured model has none."""
    unit: int
    """The budget is a multiple of it: T's alignment."""
    most: int
    """Tokens beyond which no microbatch of this run would be filled."""


@dataclass(frozen=True, kw_only=True)
class FoundBudget:
    """The budget, the same on all ranks, and how this rank came to it."""

    tokens: int
    most: int
    """Tokens that a microbatch of this run can be filled with."""
    memory_gib: float
    """That this rank may fill."""
    measured_gib: dict[int, float | None] = field(default_factory=dict)
    """T -> most of this rank's memory, UserBuffers of that capacity included; None where it ran out."""

    def __str__(self) -> str:
        why = "all that a step can fill a microbatch with" if self.tokens >= self.most else f"with {MARGIN:.0%} of the device left alone"
        taken = self.measured_gib.get(self.tokens)
        peak = "" if taken is None else f": {taken:.2f} of {self.memory_gib:.2f} GiB on rank 0"
        return f"--max-tokens-per-microbatch auto: {self.tokens:,} tokens, measured ({why}{peak})"


def find_budget(peak: Callable[[int], int | None], room: Room, *, least_of_all: Callable[[int], int]) -> FoundBudget:
    """The largest budget that fits on every rank. Every rank calls it, and all return the same.

    Args:
        peak: T -> most bytes of this rank's allocator while microbatches of T tokens run through the schedule; None: memory ran out. Every rank
            calls it with the same T, in the same order.
        room: of this rank.
        least_of_all: a collective: the least of all ranks' numbers.

    Raises:
        ConfigError: on every rank: not even one unit fits on one of them.
    """
    most = least_of_all(max(room.most - room.most % room.unit, room.unit))
    taken: dict[int, float] = {}
    best, tokens = 0, min(-(-FIRST_TOKENS // room.unit) * room.unit, most)
    for turn in range(MOST_ROUNDS):
        found = peak(tokens)
        taken[tokens] = math.inf if found is None else found + room.buffer_bytes * tokens
        if least_of_all(taken[tokens] <= room.memory):
            best = max(best, tokens)
        # Together, so that no rank goes on to what another has no room for.
        proposed = least_of_all(min(2 * tokens, most) if turn == 0 and best else _proposal(taken, room, most))
        if proposed <= best * (1 + NEAR) or proposed < room.unit:
            break
        tokens = proposed
    if best:
        measured = {tokens: None if found == math.inf else found / GIB for tokens, found in sorted(taken.items())}
        return FoundBudget(tokens=best, most=most, memory_gib=room.memory / GIB, measured_gib=measured)
    smallest = min(taken)
    needs = "more" if taken[smallest] == math.inf else f"{taken[smallest] / GIB:.2f}"
    raise ConfigError(
        f"--max-tokens-per-microbatch auto: no budget fits on every rank. Here {room.memory / GIB:.2f} GiB may be filled, and microbatches of "
        f"{smallest:,} tokens take {needs}. Divide the model further (--tensor-model-parallel-size with --sequence-parallel, "
        "--pipeline-model-parallel-size, --use-distributed-optimizer) or recompute activations (--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1)"
    )


def _proposal(taken: dict[int, float], room: Room, most: int) -> int:
    """The largest budget that this rank's measurements promise."""
    fitting = sorted(tokens for tokens, found in taken.items() if found <= room.memory)
    too_much = min((tokens for tokens, found in taken.items() if found > room.memory), default=None)
    if too_much is None:
        promised = _on_the_line(taken, *fitting[-2:], room.memory) if len(fitting) > 1 else most
        return most if promised >= most else rounded_down(promised, room.unit)
    below = max((tokens for tokens in fitting if tokens < too_much), default=0)
    if not below or taken[too_much] == math.inf:
        return rounded_down((below + too_much) // 2, room.unit)
    return rounded_down(_on_the_line(taken, below, too_much, room.memory), room.unit)


def _on_the_line(taken: dict[int, float], low: int, high: int, memory: float) -> int:
    """Tokens at which the straight line through two measured T reaches the memory."""
    slope = (taken[high] - taken[low]) / (high - low)
    return INT32_MAX if slope <= 0 else int(low + (memory - taken[low]) / slope)
