# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from, beside the lengths of the documents."""

import dataclasses
import math
import operator
from dataclasses import dataclass

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.cost import CostModel

OVERSIZE_POLICIES = ("split", "truncate", "drop", "error")
MICROBATCHINGS = ("dynamic", "packed-fixed", "fixed-count", "pad-to-max", "concat-chunk")
DOCUMENT_ORDERS = ("shuffle", "sequential", "length-window")
MOST_WINDOW = 1 << 19
INT32_MAX = 2**31 - 1


class PlanError(ValueError):
    """A plan that cannot be made, or a state that does not belong to this plan. Names what is wrong and the way out."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How the documents of each step are chosen and divided. Validated once; equal on every rank.

    Which documents a step holds, and their order, follows from `seed`, `document_order`, `drop_last` and the global batch
    alone. Everything else (budget, alignment, ranks, cost) only decides how those documents are divided.
    """

    max_tokens_per_microbatch: int
    """Token budget B: most real tokens in a microbatch."""

    global_batch_size: int | None = None
    """Documents a step. Give this or `global_batch_tokens`."""

    global_batch_tokens: int | None = None
    """Documents are taken until a step holds at least this many tokens (whole documents, before the oversize policy)."""

    data_parallel_size: int = 1
    """Ranks that share a step; all of them run the same number of microbatches."""

    alignment: int = 1
    """T is a multiple of this (tokens); see `alignment_for`."""

    document_alignment: int = 1
    """The padded length of each piece is a multiple of this (tokens); must divide `alignment`."""

    seed: int = 1234
    """Key of the epoch orders."""

    oversize: str = "split"
    """Documents above B: "split" into near-equal pieces, "truncate" to B, "drop", or "error" at construction."""

    drop_last: bool = False
    """Drop the short last step of an epoch (counted) instead of training on it."""

    max_documents_per_microbatch: int | None = None
    """Most pieces in a microbatch (many tiny documents make attention kernels and metadata slow)."""

    max_sum_squares_per_microbatch: int | None = None
    """Most of the sum of the squared lengths of a microbatch's pieces (tokens squared): bounds the time, and where scores are kept the
    memory, of attention. A document longer than its root is oversize, as one above B is."""

    microbatch_multiple: int = 1
    """Microbatches per rank are a multiple of this (what the pipeline schedule needs)."""

    document_order: str = "shuffle"
    """"shuffle": another seeded permutation each epoch; "sequential": as stored; "length-window": shuffled, then every `length_window`
    documents are sorted by length, cut into steps, and the steps put into a seeded order: documents of a step are of similar length."""

    length_window: int = 16384
    """Documents sorted together by "length-window": rounded up to whole steps of `global_batch_size`, more where they do not hold
    `global_batch_tokens`. The larger, the more alike are the lengths in a step, and the less random is which documents meet."""

    microbatching: str = "dynamic"
    """How the pieces of a step are grouped: "dynamic"; or, to compare with, "packed-fixed" (the same microbatches, T always the capacity),
    "fixed-count" (in order, `documents_per_microbatch` pieces or as many as fit, padded to their longest), "pad-to-max" (in order, every piece
    padded to the longest document, at most B, as many as fit), "concat-chunk" (documents joined and cut every B tokens, attention and
    labels crossing them: other data). See grouping.py."""

    documents_per_microbatch: int = 1
    """Pieces in a microbatch of "fixed-count"; fewer where they would not fit into B when padded."""

    cost: CostModel = CostModel()
    """Measure by which microbatches and ranks are balanced."""

    def __post_init__(self):
        counts = ("data_parallel_size", "microbatch_multiple", "length_window", "documents_per_microbatch")
        for name in ("max_tokens_per_microbatch", "alignment", "document_alignment", *counts):
            self._require_integer(name, 1)
        for name in ("global_batch_size", "global_batch_tokens", "max_documents_per_microbatch", "max_sum_squares_per_microbatch"):
            if getattr(self, name) is not None:
                self._require_integer(name, 1)
        self._require_integer("seed", 0)
        if self.seed >= 2**63:
            raise PlanError(f"seed={self.seed} does not fit 63 bits: orders would not be reproducible; take a smaller seed")
        if (self.max_sum_squares_per_microbatch or 0) >= 2**62:
            raise PlanError(
                f"max_sum_squares_per_microbatch={self.max_sum_squares_per_microbatch} does not fit 62 bits: sums would wrap; leave it out, "
                "as no microbatch comes near it"
            )
        if (self.global_batch_size is None) == (self.global_batch_tokens is None):
            raise PlanError(
                f"exactly one of global_batch_size ({self.global_batch_size}) and global_batch_tokens "
                f"({self.global_batch_tokens}) must be given: otherwise the end of a step is not defined"
            )
        for name, allowed in (("oversize", OVERSIZE_POLICIES), ("document_order", DOCUMENT_ORDERS), ("microbatching", MICROBATCHINGS)):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(allowed)}")
        capped = (self.max_documents_per_microbatch, self.max_sum_squares_per_microbatch) != (None, None)
        if self.microbatching == "concat-chunk" and (capped or self.oversize != "split"):
            raise PlanError(
                f"microbatching='concat-chunk' cuts documents every B tokens, so oversize={self.oversize!r} and caps on documents or squares "
                "would not be kept; use oversize='split' and no such cap"
            )
        if self.length_window > MOST_WINDOW:
            raise PlanError(
                f"length_window={self.length_window} is above {MOST_WINDOW}: sorting so many documents at once would take more than 64 MiB "
                "and stall a step; take a smaller window"
            )
        if not isinstance(self.drop_last, bool):
            raise PlanError(f"drop_last must be True or False, got {self.drop_last!r}")
        if not isinstance(self.cost, CostModel):
            raise PlanError(f"cost must be a CostModel, got {self.cost!r}")
        if self.alignment % self.document_alignment:
            raise PlanError(
                f"document_alignment={self.document_alignment} does not divide alignment={self.alignment}: pieces padded to one "
                "could not end on the other; use their least common multiple as the alignment"
            )
        if self.capacity > INT32_MAX:
            raise PlanError(
                f"max_tokens_per_microbatch={self.max_tokens_per_microbatch} rounded up to {self.alignment} exceeds int32, the "
                "type of cu_seqlens: offsets would wrap; take a smaller budget"
            )

    def _require_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        try:
            integer = operator.index(value)
        except TypeError as error:
            raise PlanError(f"{name} must be an integer, got {value!r}") from error
        if isinstance(value, bool) or integer < least:
            raise PlanError(f"{name} must be an integer of at least {least}, got {value!r}")
        object.__setattr__(self, name, integer)  # numpy integers become ints: the digest must not see the difference

    @property
    def capacity(self) -> int:
        """Most rows (tokens after padding) a microbatch can have: B rounded up to the alignment. Buffers are sized by it."""
        return round_up(self.max_tokens_per_microbatch, self.alignment)

    @property
    def longest_piece(self) -> int:
        """Most tokens in a piece: B, or what the cap on squares leaves of it. Longer documents follow the oversize policy."""
        squares = self.max_sum_squares_per_microbatch
        return self.max_tokens_per_microbatch if squares is None else min(self.max_tokens_per_microbatch, math.isqrt(squares))

    def to_dict(self) -> dict:
        """Plain values for digests, logs and JSON; floats are written exactly (hexadecimal)."""
        values = dataclasses.asdict(self)
        values["cost"] = {"linear": self.cost.linear.hex(), "quadratic": self.cost.quadratic.hex(), "window": self.cost.window}
        return values

    def data_order(self) -> dict:
        """The fields that decide which tokens a step trains on; resuming refuses a change of any of them."""
        names = ("seed", "global_batch_size", "global_batch_tokens", "document_order", "oversize", "drop_last")
        # The caps decide what these policies leave out.
        leaves_out = self.oversize in ("truncate", "drop")
        budget = self.max_tokens_per_microbatch if leaves_out else None
        squares = self.max_sum_squares_per_microbatch if leaves_out and self.longest_piece < self.max_tokens_per_microbatch else None
        window = self.length_window if self.document_order == "length-window" else None
        caps = {"max_tokens_per_microbatch": budget, "max_sum_squares_per_microbatch": squares}
        return {**{name: getattr(self, name) for name in names}, **caps, "length_window": window}
