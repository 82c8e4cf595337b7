# SPDX-License-Identifier: Apache-2.0
"""Arguments of a blend, the split by document, and the order of a blended epoch: pure functions of lengths.

Weights are shares of *tokens*. Rule of a blended epoch: the corpus with the smallest weight for its size appears exactly once, all
others are repeated: whole passes, then a seeded selection of documents for the remaining fraction.
"""

import math
from typing import NamedTuple, Sequence

import numpy as np

from megatron_dyn.corpus.errors import CorpusError

SPLIT_NAMES = ("train", "valid", "test")
MAX_EPOCH_DOCUMENTS = 1 << 29  # above it the order alone takes more than 2 GB in each process, and many times that while it is made


class Blend(NamedTuple):
    """Prefixes and their weights (None: each corpus once, as it is)."""

    prefixes: list[str]
    weights: list[float] | None


def parse_data_path(data_path: Sequence[str]) -> Blend:
    """Reads ``["A"]``, ``["A", "B"]`` or ``["0.7", "A", "0.3", "B"]`` as Megatron's ``get_blend_from_list`` does.

    Raises:
        CorpusError: nothing given, weights for some corpora only, or a weight that is not a positive finite number.
    """
    items = [str(item).strip() for item in data_path]
    if not items or not all(items):
        raise CorpusError(f"--data-path {list(data_path)}: give one prefix, or weights and prefixes in turn (0.7 A 0.3 B)")

    def number(item: str) -> float | None:
        try:
            return float(item)
        except ValueError:
            return None

    numbers = [number(item) for item in items]
    if all(found is None for found in numbers):
        return Blend(items, None)
    pairs_right = len(items) % 2 == 0 and all((found is not None) == (i % 2 == 0) for i, found in enumerate(numbers))
    if not pairs_right:
        raise CorpusError(f"--data-path {' '.join(items)}: give a weight before every prefix (0.7 A 0.3 B), or no weight at all")
    weights = numbers[::2]
    for weight, prefix in zip(weights, items[1::2]):
        if not (math.isfinite(weight) and weight > 0):
            raise CorpusError(f"--data-path: the weight of {prefix} is {weight}; a weight is a positive number: leave the corpus out instead")
    total = sum(weights)
    return Blend(items[1::2], [weight / total for weight in weights])


def parse_split(split: str) -> list[float]:
    """Shares of train, valid and test from ``"98,2"``; they add up to 1.

    Raises:
        CorpusError: not one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    good = 1 <= len(shares) <= 3 and all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    if not good:
        raise CorpusError(f"--split {split!r}: give one to three shares for train, valid and test, for example 98,2")
    shares += [0.0] * (3 - len(shares))
    return [float(share) for share in np.array(shares) / np.sum(shares)]


def split_ranges(num_documents: int, shares: Sequence[float], name: str) -> list[tuple[int, int]]:
    """Contiguous document ranges [first, last) of train, valid and test, rounded as Megatron rounds them.

    Source: ``BlendedMegatronDatasetBuilder`` and ``convert_split_vector_to_split_matrix``.

    Raises:
        CorpusError: a part with a share above 0 would hold no document.
    """
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    # The shares add up to 1 only within rounding; the last part with a share ends at the last document.
    last = max(i for i, share in enumerate(shares) if share > 0)
    bounds[last + 1 :] = [1.0] * (len(bounds) - last - 1)
    edges = [round(bound * num_documents) for bound in bounds]
    ranges = list(zip(edges[:-1], edges[1:]))
    for part, share, (first, end) in zip(SPLIT_NAMES, shares, ranges):
        if share > 0 and first == end:
            counts = ", ".join(f"{n} {e - f}" for n, (f, e) in zip(SPLIT_NAMES, ranges))
            raise CorpusError(
                f"{name}: a share of {share:.4g} of its {num_documents} documents leaves none for {part} (counts: {counts}); "
                f"give {part} a larger share in --split, or 0"
            )
    return ranges


def fraction_of_documents(lengths: np.ndarray, target_tokens: float, rng: np.random.Generator) -> np.ndarray:
    """Documents, in order, of a random selection whose tokens come as near to the target as a prefix of a random order can."""
    order = rng.permutation(len(lengths))
    totals = np.concatenate(([0], np.cumsum(lengths[order], dtype=np.int64)))
    count = int(np.abs(totals - target_tokens).argmin())
    return np.sort(order[:count])


def blended_order(lengths_per_corpus: Sequence[np.ndarray], weights: Sequence[float], seed: int) -> np.ndarray:
    """The virtual documents of one blended epoch.

    Corpora are interleaved by the share of their own tokens passed, so any stretch of the order has about the weights asked for
    even when the planner does not shuffle.

    Args:
        lengths_per_corpus: tokens per document of each corpus, integer [D_i]; each has tokens.
        weights: share of the tokens of each corpus.
        seed: of the selections for the fractions of a pass.

    Returns:
        int32 [V]: each virtual document as its place in the corpora one after the other.

    Raises:
        CorpusError: the weights repeat a small corpus beyond all measure.
    """
    sizes = [int(lengths.sum(dtype=np.int64)) for lengths in lengths_per_corpus]
    epoch_tokens = max(size / weight for size, weight in zip(sizes, weights))
    epoch_documents = sum(len(n) * w * epoch_tokens / s for n, w, s in zip(lengths_per_corpus, weights, sizes))
    if epoch_documents > MAX_EPOCH_DOCUMENTS:
        raise CorpusError(
            f"--data-path: weights {[round(weight, 6) for weight in weights]} on corpora of {sizes} tokens repeat the small ones so often that an "
            f"epoch has {epoch_documents:.3g} documents (at most {MAX_EPOCH_DOCUMENTS}); give the small corpora smaller weights"
        )
    chosen = []
    for i, (lengths, size, weight) in enumerate(zip(lengths_per_corpus, sizes, weights)):
        passes = weight * epoch_tokens / size
        whole = int(passes + 1e-9)  # the corpus that appears once must not fall to 0.999... passes
        rest = fraction_of_documents(lengths, max(0.0, passes - whole) * size, np.random.default_rng([seed, i]))
        chosen.append(np.concatenate([np.arange(len(lengths), dtype=np.int32)] * whole + [rest.astype(np.int32)]))
    places, begin, first = np.empty(sum(map(len, chosen))), 0, 0
    for documents, lengths in zip(chosen, lengths_per_corpus):
        sizes_here = lengths[documents]
        passed = np.cumsum(sizes_here, dtype=np.int64)
        places[begin : begin + len(documents)] = (passed - sizes_here / 2) / passed[-1]
        documents += np.int32(first)  # each corpus appears once at least: all of them are within MAX_EPOCH_DOCUMENTS
        begin, first = begin + len(documents), first + len(lengths)
    order = np.argsort(places, kind="stable")
    del places
    return np.concatenate(chosen)[order]
