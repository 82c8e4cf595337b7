# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch, computed for any place of it without a list of all documents.

Shapes: m places asked for, of n.

| array                           | shape | dtype  | meaning                                       |
|---------------------------------|-------|--------|-----------------------------------------------|
| places (in), ranks (out)        | [m]   | int64  | 0 .. n-1; rank r is the r-th document not empty |
| left, right half and their sums | [m]   | uint64 | base-`columns` digits of a place              |

The permutation is a Feistel network over the numbers 0 .. rows*columns-1, the smallest such rectangle that is nearly square and holds n
numbers (Black and Rogaway 2002, "Ciphers with arbitrary finite domains": the generalised Feistel cipher; what falls outside 0 .. n-1 is
put through the network again, "cycle walking", which a share of at most 1/sqrt(n) of the places needs). It is defined here by explicit
64-bit integer arithmetic, not by a library's random generator, so that no upgrade and no platform changes the data order of a run. The
round function and the keys are splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

import math
from functools import lru_cache

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1
ROUNDS = 10
"""As many as FF1 of NIST SP 800-38G has."""
SMALL = 1 << 16
SMALL_ROUNDS = 24
"""Below SMALL documents the round functions have few values, and 10 rounds make some permutations of 6 documents much likelier than others."""
CHUNK = 1 << 16
"""Places put through the network together: its arrays then stay in the processor's cache."""


def mix64(value: int) -> int:
    """Splitmix64's output function on one integer modulo 2**64: a bijection."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def mix64_in_place(values: np.ndarray) -> np.ndarray:
    """`mix64` of each element, uint64; array arithmetic wraps modulo 2**64, as the definition wants."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def epoch_key(seed: int, epoch: int) -> int:
    """64-bit key of one epoch's order."""
    return mix64(mix64(seed + GOLDEN_GAMMA) + (epoch + 1) * GOLDEN_GAMMA)


class Permutation:
    """A keyed permutation of 0 .. size-1 that is computed place by place, in O(1) memory.

    Args:
        size: n, at least 1.
        key: 64 bits, see `epoch_key`.
    """

    def __init__(self, size: int, key: int):
        self.size = size
        self.rows = math.isqrt(size - 1) + 1
        self.columns = -(-size // self.rows)
        rounds = ROUNDS if size >= SMALL else SMALL_ROUNDS
        self.round_keys = [mix64(key + (number + 1) * GOLDEN_GAMMA) for number in range(rounds)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Where the order has which rank, int64 [m].

        Args:
            places: integer [m], each 0 .. size-1.
        """
        places = np.asarray(places)
        ranks = np.empty(len(places), dtype=np.int64)
        for begin in range(0, len(places), CHUNK):
            part = self._network(places[begin : begin + CHUNK].astype(np.uint64))
            outside = np.flatnonzero(part >= self.size)
            while len(outside):
                walked = self._network(part[outside])
                part[outside] = walked
                outside = outside[walked >= self.size]
            ranks[begin : begin + CHUNK] = part
        return ranks

    def _network(self, numbers: np.ndarray) -> np.ndarray:
        """One pass: alternately adds a keyed function of one digit to the other, modulo the other's base."""
        columns = np.uint64(self.columns)
        high, low = (numbers // columns, self.rows), (numbers % columns, self.columns)
        for number, key in enumerate(self.round_keys):
            (changed, base), (other, _) = (high, low) if number % 2 == 0 else (low, high)
            mixed = other * np.uint64(GOLDEN_GAMMA)
            mixed += np.uint64(key)
            mix64_in_place(mixed)
            mixed >>= np.uint64(32)
            mixed *= np.uint64(base)  # upper 32 bits * base / 2**32: even over 0 .. base-1, without a division
            mixed >>= np.uint64(32)
            changed += mixed
            np.minimum(changed, changed - np.uint64(base), out=changed)  # below the base the difference wraps and is the larger
        return high[0] * columns + low[0]


@lru_cache(maxsize=4)
def epoch_permutation(size: int, seed: int, epoch: int) -> Permutation:
    """The shuffle of one epoch; a few are kept."""
    return Permutation(size, epoch_key(seed, epoch))


@lru_cache(maxsize=4)
def _whole_epoch(size: int, seed: int, epoch: int) -> np.ndarray:
    """All ranks of a small epoch, int64 [size]: looking them up is quicker than two dozen rounds for each step."""
    ranks = epoch_permutation(size, seed, epoch)(np.arange(size))
    ranks.flags.writeable = False
    return ranks


def ranks_at(begin: int, end: int, *, size: int, document_order: str, seed: int, epoch: int) -> np.ndarray:
    """Ranks at the places begin .. end-1 of an epoch of `size` documents, int64 [end - begin], before any window is sorted."""
    if document_order != "sequential" and size < SMALL:
        return _whole_epoch(size, seed, epoch)[begin:end]
    places = np.arange(begin, end, dtype=np.int64)
    return places if document_order == "sequential" else epoch_permutation(size, seed, epoch)(places)


def order_of_runs(count: int, *, seed: int, epoch: int, window: int) -> np.ndarray:
    """Keyed order of the steps of one window of "length-window", int64 [count], in O(count) memory.

    Args:
        count: steps in the window.
        window: place where the window begins.
    """
    state = mix64(epoch_key(seed, epoch) ^ mix64(window + 1))
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA)
    keys += np.uint64(state)
    return np.argsort(mix64_in_place(keys), kind="stable")  # distinct: the mixing is a bijection
