# SPDX-License-Identifier: Apache-2.0
"""The order of documents in an epoch, and where its steps end.

The permutation is defined here by explicit 64-bit integer arithmetic, not by a library's random generator, so that no
upgrade and no platform changes the data order of a run. Keys are outputs of splitmix64 (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators"), whose mixing step is a bijection: distinct documents have distinct
keys, so the sort never meets a tie.
"""

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 2**64 - 1


def mix64(value: int) -> int:
    """Splitmix64's output function on one integer modulo 2**64."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def shuffle_keys(documents: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Sort keys, uint64 [n]: `mix64(state + (document + 1) * gamma)` with a state keyed by (seed, epoch)."""
    state = mix64(mix64(seed + GOLDEN_GAMMA) + (epoch + 1) * GOLDEN_GAMMA)
    keys = documents.astype(np.uint64)
    keys += np.uint64(1)
    keys *= np.uint64(GOLDEN_GAMMA)  # array arithmetic wraps modulo 2**64, as the definition wants
    keys += np.uint64(state)
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return keys


def epoch_order(documents: np.ndarray, *, document_order: str, seed: int, epoch: int) -> np.ndarray:
    """Document ids in the order of one epoch, int64 [n].

    Args:
        documents: ids that are not empty, int64 [n], rising.
        document_order: "shuffle" or "sequential".
    """
    if document_order == "sequential":
        return documents
    return documents[np.argsort(shuffle_keys(documents, seed, epoch), kind="stable")]


def token_step_ends(lengths: np.ndarray, target: int) -> np.ndarray:
    """Ends of steps that stop as soon as they hold `target` tokens, int64 [steps], as positions in the epoch order.

    The last step ends with the last document and may hold fewer tokens than the target.

    Args:
        lengths: lengths in epoch order, int64 [n], all positive.
    """
    total = np.cumsum(lengths, dtype=np.int64)
    ends, reached = [], 0
    while not ends or ends[-1] < len(total):
        end = min(int(np.searchsorted(total, reached + target)) + 1, len(total))
        reached = int(total[end - 1])
        ends.append(end)
    return np.asarray(ends, dtype=np.int64)
