# SPDX-License-Identifier: Apache-2.0
"""The densest packing: bins are closed one after the other, each filled to the last token wherever some pieces do that.

Shapes: p pieces, M bins, D groups of pieces of one weight that go to one bin together.

First-fit decreasing, turned around: a bin takes the longest piece left, then the longest that still fits, and so on. Two
things are added. Pieces of one weight are a number in a table, so a million pieces are a few hundred thousand steps. And
where the longest fitting piece would leave a gap, two pieces that fill the room exactly are looked for instead, so that
nearly every bin is full: what the bound allows is then reached even when the slack is less than one bin in 100,000.
All integers; the pieces of one weight leave in their order.
"""

import numpy as np

LOOKS = 24
"""Pairs tried to fill a room exactly, with and without the spared pieces."""
SPARED = 4
"""One piece in so many, the shortest ones, is kept for the last bins where others will do: short pieces fill any gap."""


def dense(weight: np.ndarray, *, cap: int, pieces: int, rooms: list[tuple[int, int]] = ()) -> np.ndarray | None:
    """Bin of each piece, int64 [p].

    Args:
        weight: int64 [p], falling, each in 1..cap.
        cap: most weight in a bin.
        pieces: most pieces in a bin.
        rooms: (weight, pieces) that each of a fixed number of bins can still take; None comes back when that is not enough.
            Without it there are as many bins as it takes.
    """
    longest = int(weight[0]) if len(weight) else 0
    left = np.bincount(weight, minlength=longest + 1)
    position = (len(weight) - np.cumsum(left)).tolist()  # first piece of each weight
    left = left.tolist()
    shorter = list(range(-1, longest))  # the next weight that may be left, for weights that are used up
    group_first, group_size, group_bin = [], [], []
    todo, number = len(weight), 0
    spared = int(weight[-1 - len(weight) // SPARED]) if len(weight) else 0

    def longest_left(at: int) -> int:
        """The longest weight of at most `at` that is left, or 0; paths are shortened on the way."""
        seen = at
        while at > 0 and not left[at]:
            at = shorter[at]
        while seen > at:
            shorter[seen], seen = at, shorter[seen]
        return at

    while todo:
        if rooms and number == len(rooms):
            return None
        room, places = rooms[number] if rooms else (cap, pieces)
        longest = longest_left(longest)
        at = longest_left(min(room, longest)) if places else 0
        while at:
            if room < 2 * at and room != at and places > 1:
                take = _exact_pair(at, room, spared, left, longest_left)
            else:
                take = ((at, min(left[at], max(room // at - 1, 1), places)),)  # the last piece is chosen with care
            for w, size in take:
                group_first.append(position[w])
                group_size.append(size)
                group_bin.append(number)
                position[w] += size
                left[w] -= size
                room -= w * size
                places -= size
                todo -= size
            if not room or not places:
                break
            at = longest_left(min(room, longest))
        number += 1
    sizes = np.asarray(group_size, dtype=np.int64)
    index = np.repeat(np.asarray(group_first, dtype=np.int64) - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(weight))
    bin_of = np.empty(len(weight), dtype=np.int64)
    bin_of[index] = np.repeat(np.asarray(group_bin, dtype=np.int64), sizes)
    return bin_of


def _exact_pair(at: int, room: int, spared: int, left: list[int], longest_left) -> tuple[tuple[int, int], ...]:
    """Two pieces that fill `room`, the longer one as long as possible; else the longest piece alone.

    Args:
        at: the longest weight left that fits, more than half of the room.
        spared: pieces so short are taken only when no others do.
    """
    for a in (longest_left(min(max(room - spared, 0), at)), at):
        for _ in range(LOOKS):
            b = room - a
            if b > a:
                break
            if left[b] > (a == b):
                return ((a, 1), (b, 1))
            a = longest_left(a - 1)
    return ((at, 1),)
