# SPDX-License-Identifier: Apache-2.0
"""What a plan is: the microbatches of one step, on every rank.

Shapes: S segments of a microbatch (its pieces).

| array             | shape   | dtype | meaning                                                               |
|-------------------|---------|-------|-----------------------------------------------------------------------|
| cu_seqlens        | [S + 1] | int32 | real boundaries: [0, 5, 9, 17]                                        |
| cu_seqlens_padded | [S + 1] | int32 | where segments lie in the T rows: [0, 5, 9, 20], last = T             |
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np

from megatron_dyn.planning.pieces import Piece


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchPlan:
    """One packed forward and backward pass.

    All padding lies at the end (with a document alignment, at the end of each piece). A microbatch without pieces is a
    *filler*: it keeps the number of microbatches equal on all ranks, holds `alignment` rows of padding and no loss token.
    """

    pieces: tuple[Piece, ...]
    num_tokens: int
    """Real tokens."""
    num_loss_tokens: int
    """Tokens that have a label: all but the last of each document."""
    T: int
    """Rows after padding: a multiple of the alignment, at most the capacity."""
    cu_seqlens: np.ndarray
    cu_seqlens_padded: np.ndarray
    max_seqlen: int
    """Longest padded segment."""
    cost: float
    """By the plan's cost model; 0 for a filler."""
    joined: bool = False
    """One segment that goes on from piece to piece: positions, attention and labels cross them ("concat-chunk")."""
    following: Piece | None = None
    """Of a joined microbatch: the piece that the step's stream goes on with; its first token is the last label."""

    @property
    def is_filler(self) -> bool:
        return not self.pieces


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What a step holds and wastes, over all ranks. Equal on every rank."""

    tokens: int
    loss_tokens: int
    squared_tokens: int
    """Sum of the squared lengths that attention spans: of pieces, or of whole microbatches where they are joined."""
    documents: int
    """Documents trained on, whole or in part (dropped ones are not)."""
    pieces: int
    microbatches: int
    """Over all ranks, fillers included."""
    fillers: int
    T_min: int
    """T_min, T_mean, T_max are over microbatches that hold documents (the filler's T when none does)."""
    T_mean: float
    T_max: int
    capacity: int
    slots: int
    """Sum of T over all microbatches, fillers included."""
    padding: int
    """slots - tokens."""
    fill: float
    """tokens / (microbatches * B)."""
    slot_fill: float
    """tokens / slots."""
    imbalance: float
    """Largest / mean cost over the microbatches that hold documents (1 when none does)."""
    rank_imbalance: float
    """Largest / mean over ranks of the sum of costs (1 when the step holds no document)."""
    split_documents: int
    truncated_documents: int
    truncated_tokens: int
    dropped_documents: int
    dropped_tokens: int
    empty_documents: int
    """Empty documents of the corpus, counted at the first step of each epoch: they are left out before it is ordered."""
    drop_last_documents: int
    """Documents of the short tail that `drop_last` left out, counted at the last step of the epoch."""

    def as_dict(self) -> dict:
        """Plain numbers, for JSON lines and tables."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One optimizer step. Equal digests mean equal plans."""

    step: int
    epoch: int
    documents: np.ndarray
    """Ids of the step in epoch order, int64 [n], before the oversize policy; independent of ranks and budget."""
    microbatches: tuple[tuple[MicrobatchPlan, ...], ...]
    """[data-parallel rank][i]; every rank has the same number."""
    stats: StepStats
    digest: str
    """Hex sha256 over fingerprint, configuration, step, and every piece, boundary and T."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches per data-parallel rank (K)."""
        return len(self.microbatches[0])

    @property
    def num_loss_tokens(self) -> int:
        """Over the whole step: what the sum of token losses is divided by."""
        return self.stats.loss_tokens

    @property
    def documents_digest(self) -> str:
        """16 hex digits for the documents of the step and their order, whatever they are grouped into."""
        return hashlib.sha256(np.ascontiguousarray(self.documents, dtype="<i8").tobytes()).hexdigest()[:16]

    @property
    def num_documents(self) -> int:
        """Documents trained on, over the whole step."""
        return self.stats.documents
