# SPDX-License-Identifier: Apache-2.0
"""Packing metadata, checked and turned into attention calls: which rows of a pack are attended to together.

cu_seqlens    [pieces + 1] int32     real lengths; offsets come from cu_seqlens_*_padded where given
rows          [T, ...]               tokens of the pack; rows that belong to no piece are padding
sorted rows   [P, ...]               by falling piece length, each piece filled up to its group's length (P >= T - padding)
"""

from collections import Counter
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

_LAYOUT = "_megatron_dyn_layout"


class PackedLayoutError(ValueError):
    """The packing metadata does not describe the tokens it came with."""


@dataclass(frozen=True, kw_only=True)
class Sorting:
    """The map between the pack's T rows and P rows sorted by piece length.

    Attributes:
        to_groups: [P] int64, row of the pack for each sorted row.
        filler: positions in [0, P) that hold no token.
        to_pack: [T] int64, sorted row for each row of the pack.
        padding: positions in [0, T) that belong to no piece.
    """

    to_groups: Tensor
    filler: Tensor
    to_pack: Tensor
    padding: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Which rows of a pack are attended to in one call; made once per microbatch.

    Attributes:
        cu_seqlens: the tensor it was made from, to notice another one.
        num_rows: T.
        groups: (pieces, length) of each SDPA call in the order of the rows; (0, rows) stands for rows of no piece.
        sorting: None when the rows stay where they are.
    """

    cu_seqlens: Tensor
    num_rows: int
    groups: tuple[tuple[int, int], ...]
    sorting: Sorting | None

    @property
    def num_calls(self) -> int:
        return sum(1 for count, _ in self.groups if count)


def layout_of(params: PackedSeqParams, num_rows: int, width: int) -> PackedLayout:
    """The layout of this microbatch, made at its first use and kept on ``params`` itself.

    It is bound to the microbatch because pipelines run the forward of one between the forward and backward of another, and
    recomputation replays an old one.

    Raises:
        PackedLayoutError: see `build_layout`.
    """
    layout = params.__dict__.get(_LAYOUT)
    if layout is None or layout.cu_seqlens is not params.cu_seqlens_q or layout.num_rows != num_rows:
        layout = build_layout(params, num_rows, width)
        params.__dict__[_LAYOUT] = layout
    return layout


def build_layout(params: PackedSeqParams, num_rows: int, width: int) -> PackedLayout:
    """Check the packing metadata against T and sort the pieces into groups.

    Args:
        params: ``cu_seqlens_q`` are real lengths; the pieces start at ``cu_seqlens_q_padded`` where given.
        num_rows: T, the rows of query, key and value.
        width: numbers in one row of the queries, which decides how much filling a call is worth.
    Raises:
        PackedLayoutError: offsets that do not run from 0 to T, overlapping or negative pieces, keys packed unlike queries,
            context parallelism, or a ``max_seqlen`` with which Megatron's RoPE would let positions run on.
    """
    real = _offsets(params.cu_seqlens_q, "cu_seqlens_q")
    start = real if params.cu_seqlens_q_padded is None else _offsets(params.cu_seqlens_q_padded, "cu_seqlens_q_padded")
    for name, mine in (("cu_seqlens_kv", params.cu_seqlens_q), ("cu_seqlens_kv_padded", params.cu_seqlens_q_padded)):
        other = getattr(params, name)
        if other is not mine and (other is None or mine is None or not torch.equal(other, mine)):
            raise PackedLayoutError(f"{name} differs from the queries' offsets: self-attention needs the same pieces for both.")
    if getattr(params, "local_cp_size", None) not in (None, 1):
        raise PackedLayoutError("the pack is divided by context parallelism, which local attention does not support.")
    if len(real) != len(start):
        raise PackedLayoutError(f"cu_seqlens_q has {len(real)} offsets but cu_seqlens_q_padded has {len(start)}.")
    if start[-1] != num_rows:
        raise PackedLayoutError(
            f"cu_seqlens end at {start[-1]} but the microbatch has T = {num_rows} rows: the rest would be attended by nobody and "
            "rotated by nothing. Extend the last entry of cu_seqlens_q_padded to T."
        )
    lengths = [b - a for a, b in zip(real, real[1:])]
    rooms = [b - a for a, b in zip(start, start[1:])]
    for piece, (length, room) in enumerate(zip(lengths, rooms)):
        if not 0 <= length <= room:
            raise PackedLayoutError(
                f"piece {piece} has {length} tokens in a segment of {room} rows ({start[piece]} to {start[piece + 1]})."
            )
    longest = max(rooms)
    if params.max_seqlen_q is not None and (params.max_seqlen_q < longest or (params.max_seqlen_q == num_rows > longest)):
        raise PackedLayoutError(
            f"max_seqlen_q is {params.max_seqlen_q} but the longest padded segment has {longest} of T = {num_rows} rows: Megatron's "
            "RoPE would rotate with wrong positions (they run on across documents when max_seqlen equals T). Set it to the "
            "longest padded segment."
        )
    return _arrange(params.cu_seqlens_q, num_rows, start[:-1], lengths, width)


def _offsets(cu_seqlens: Tensor | None, name: str) -> list[int]:
    if cu_seqlens is None or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise PackedLayoutError(f"{name} must be a one-dimensional tensor of at least two offsets (0 and T).")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise PackedLayoutError(f"{name} starts at {offsets[0]}, not at 0: the rows before it would belong to no document.")
    return offsets


# Costs, in numbers of a query row of a short piece (benchmarks/cpu_attention.py, fp32, forward and backward): a call; a row in a
# long group, which attends to more keys; moving a row to another place and back, and starting to move any (in calls).
CALL_NUMBERS, KEYS_THAT_DOUBLE_A_ROW, SORTING_SHARE, SORTING_CALLS = 2500, 128, 0.2, 3

def group_lengths(lengths: list[int], width: int) -> list[int]:
    """The length at which each piece is computed: its own, or that of a slightly longer piece it shares a call with.

    Args:
        lengths: tokens of each piece, falling.
        width: numbers in one row of the queries (heads/tp * channels).
    Returns:
        for each piece the length of its group. Pieces of one length join the group above them while filling them all up
        costs less than a call of their own.
    """
    chosen: list[int] = []
    current = 0
    for length, count in Counter(lengths).items():
        if not chosen or _fill_cost(count, length, current, width) > CALL_NUMBERS:
            current = length
        chosen += [current] * count
    return chosen


def _fill_cost(count: int, length: int, group: int, width: int) -> float:
    return count * (group - length) * width * (1 + group / KEYS_THAT_DOUBLE_A_ROW)


def _arrange(cu_seqlens: Tensor, num_rows: int, starts: list[int], lengths: list[int], width: int) -> PackedLayout:
    pieces = [(start, length) for start, length in zip(starts, lengths) if length]
    if not pieces:
        raise PackedLayoutError("no piece has a token: there is nothing to attend to. Leave such a microbatch out.")
    in_place = PackedLayout(cu_seqlens=cu_seqlens, num_rows=num_rows, groups=_groups_in_place(pieces, num_rows), sorting=None)
    pieces.sort(key=lambda piece: (-piece[1], piece[0]))
    falling = [length for _, length in pieces]
    sizes = group_lengths(falling, width)
    groups = tuple((count, size) for size, count in Counter(sizes).items())
    fill = sum(_fill_cost(1, length, size, width) for length, size in zip(falling, sizes))
    saved = CALL_NUMBERS * (in_place.num_calls - len(groups) - SORTING_CALLS)
    if saved <= fill + SORTING_SHARE * num_rows * width:
        return in_place
    return PackedLayout(cu_seqlens=cu_seqlens, num_rows=num_rows, groups=groups, sorting=_sort(pieces, sizes, num_rows, cu_seqlens.device))


def _groups_in_place(pieces: list[tuple[int, int]], num_rows: int) -> tuple[tuple[int, int], ...]:
    groups: list[tuple[int, int]] = []
    end = 0
    for start, length in [*pieces, (num_rows, 0)]:
        if start > end:
            groups.append((0, start - end))
        if groups and length and groups[-1][0] and groups[-1][1] == length:
            groups[-1] = (groups[-1][0] + 1, length)
        elif length:
            groups.append((1, length))
        end = start + length
    return tuple(groups)


def _sort(pieces: list[tuple[int, int]], sizes: list[int], num_rows: int, device: torch.device) -> Sorting:
    start_N, length_N = torch.tensor(pieces, dtype=torch.int64).unbind(1)
    size_N = torch.tensor(sizes, dtype=torch.int64)
    spread = lambda x_N: x_N.repeat_interleave(size_N)  # noqa: E731
    within_P = torch.arange(int(size_N.sum())) - spread(size_N.cumsum(0) - size_N)
    is_token_P = within_P < spread(length_N)
    to_groups = torch.where(is_token_P, spread(start_N) + within_P, 0)
    tokens = is_token_P.nonzero().squeeze(1)
    to_pack = torch.full((num_rows,), -1, dtype=torch.int64)
    to_pack[to_groups[tokens]] = tokens
    return Sorting(
        to_groups=to_groups.to(device),
        filler=(~is_token_P).nonzero().squeeze(1).to(device),
        to_pack=to_pack.clamp(min=0).to(device),
        padding=(to_pack < 0).nonzero().squeeze(1).to(device),
    )
