# SPDX-License-Identifier: Apache-2.0
"""Splits, blends, fingerprints: against Megatron's own rules, and as properties."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix, parse_and_normalize_split
from megatron.core.datasets.utils import get_blend_from_list

from megatron_dyn.corpus import CorpusError, IndexedReader, IndexedWriter, open_corpus
from megatron_dyn.corpus.blending import blended_order, parse_data_path, parse_split, split_ranges
from megatron_dyn.corpus.document_order import DocumentOrder


def make(folder, name, lengths, first_id=0) -> str:
    """Token j of document i is (first_id + i + j) % 1000."""
    with IndexedWriter(folder / name, vocab_size=1000) as writer:
        for i, length in enumerate(lengths):
            writer.add_document([(first_id + i + j) % 1000 for j in range(length)])
    return str(folder / name)


@pytest.fixture
def two(tmp_path):
    rng = np.random.default_rng(3)
    return make(tmp_path, "A", rng.integers(1, 40, 300)), make(tmp_path, "B", rng.integers(1, 200, 50), first_id=500)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(1, 100_000))
def test_split_is_megatrons(shares, num_documents):
    split = ",".join(map(str, shares))
    theirs = []
    for part in convert_split_vector_to_split_matrix(parse_and_normalize_split(split)):
        theirs.append(None if part is None else (int(round(part[0] * float(num_documents))), int(round(part[1] * float(num_documents)))))
    try:
        ours = split_ranges(num_documents, parse_split(split), "corpus")
    except CorpusError:
        assert any(part is not None and part[0] == part[1] for part in theirs)
        return
    for mine, part in zip(ours, theirs):
        assert mine == part if part is not None else mine[0] == mine[1]
    assert sum(end - first for first, end in ours) == num_documents


@pytest.mark.parametrize("items", [["A"], ["A", "B", "C"], ["A", "B"], ["30", "A", "70", "B"], ["0.7", "A ", " 0.3", "B"]])
def test_data_path_is_read_as_megatron_does(items):
    prefixes, weights = get_blend_from_list(items)
    blend = parse_data_path(items)
    assert blend.prefixes == prefixes
    if weights is None:
        assert blend.weights is None
    else:
        assert blend.weights == pytest.approx(np.array(weights) / np.sum(weights))


@pytest.mark.parametrize(
    "items", [[], [""], ["0.5"], ["0.5", "A", "B"], ["A", "0.5"], ["0.5", "A", "B", "0.5"], ["0", "A", "1", "B"], ["-1", "A"], ["nan", "A"], ["inf", "A"]]
)
def test_wrong_data_paths_are_refused(items):
    with pytest.raises(CorpusError, match="--data-path"):
        parse_data_path(items)


@pytest.mark.parametrize("split", ["", "a,b", "98;2", "-1,2", "0,0", "1,1,1,1", "nan,1"])
def test_wrong_splits_are_refused(split):
    with pytest.raises(CorpusError, match="--split"):
        parse_split(split)


def test_split_by_document(two):
    splits = open_corpus([two[0]], split="90,5,5")
    reader = IndexedReader(two[0])
    assert (len(splits.train), len(splits.valid), len(splits.test)) == (270, 15, 15)
    assert splits.valid.lengths.tolist() == reader.lengths[270:285].tolist()
    assert splits.valid.tokens(3, 0, 1).tolist() == [273] and splits.valid.describe(3) == f"{two[0]}, document 273"
    assert splits.train.num_tokens + splits.valid.num_tokens + splits.test.num_tokens == reader.num_tokens
    assert open_corpus([two[0]], split="1").valid is None and open_corpus([two[0]], split="0,1").train is None


def test_an_empty_part_with_a_share_is_an_error_naming_counts(tmp_path):
    prefix = make(tmp_path, "small", [3] * 10)
    with pytest.raises(CorpusError, match=r"small.*10 documents leaves none for valid \(counts: train 10, valid 0, test 0\)"):
        open_corpus([prefix])


def test_a_part_without_tokens_is_an_error(tmp_path):
    prefix = make(tmp_path, "tail", [3] * 9 + [0])
    with pytest.raises(CorpusError, match="documents 9 to 9, its valid part, hold no token"):
        open_corpus([prefix], split="90,10")


def test_no_weights_is_one_pass_over_each(two):
    train = open_corpus(list(two), split="1").train
    a, b = IndexedReader(two[0]), IndexedReader(two[1])
    assert train.lengths[:].tolist() == a.lengths.tolist() + b.lengths.tolist()
    assert train.tokens(300).tolist() == b.tokens(0).tolist() and train.describe(301) == f"{two[1]}, document 1"


def test_blend_has_the_shares_asked_for(two):
    splits = open_corpus(["0.7", two[0], "0.3", two[1]], split="80,20", seed=1)
    train = splits.train
    sizes = {p: int(IndexedReader(p).lengths[: n].sum()) for p, n in ((two[0], 240), (two[1], 40))}
    counted = {p: 0 for p in two}
    seen = {p: np.zeros(300, int) for p in two}
    for document in range(len(train)):
        prefix, number = train.describe(document).split(", document ")
        counted[prefix] += int(train.lengths[document])
        seen[prefix][int(number)] += 1
        assert len(train.tokens(document)) == train.lengths[document]
    assert counted[two[0]] / train.num_tokens == pytest.approx(0.7, abs=0.01)
    once = min(two, key=lambda p: {two[0]: 0.7, two[1]: 0.3}[p] / sizes[p])
    other = two[1] if once == two[0] else two[0]
    assert set(seen[once][: 240 if once == two[0] else 40]) == {1}, "the corpus with the smallest weight for its size appears exactly once"
    used = seen[other][: 240 if other == two[0] else 40]
    assert used.max() - used.min() <= 1, "whole passes and one fraction"
    assert seen[two[0]][240:].sum() == 0 and seen[two[1]][40:].sum() == 0, "no document of valid in train"
    assert any("70.0" in line and "asked 70.00%" in line for line in splits.report)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any), min_size=2, max_size=4),
    st.data(),
    st.integers(0, 5),
)
def test_blend_properties(corpora, data, seed):
    weights = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(corpora), max_size=len(corpora))), float)
    weights /= weights.sum()
    lengths = [np.array(corpus, np.int64) for corpus in corpora]
    order = blended_order(lengths, weights.tolist(), seed)
    assert order.dtype == np.int32 and np.array_equal(order, blended_order(lengths, weights.tolist(), seed))
    which, documents = DocumentOrder([(0, len(part)) for part in lengths], order).at(np.arange(len(order)))
    sizes = np.array([part.sum() for part in lengths])
    epoch = (sizes / weights).max()
    for i, part in enumerate(lengths):
        counts = np.bincount(documents[which == i], minlength=len(part))
        passes = weights[i] * epoch / sizes[i]
        assert counts.min() >= int(passes + 1e-9) >= 1 and counts.max() <= int(passes + 1e-9) + 1
        tokens = int(part[documents[which == i]].sum())
        assert abs(tokens - weights[i] * epoch) <= part.max() / 2 + 1e-6, "as near as whole documents allow"


def test_the_corpus_that_appears_once_survives_rounding():
    """0.7 * (3 / 0.7) / 3 is 0.999...: its empty documents must not be lost with it."""
    order = blended_order([np.array([0] * 20 + [3] + [0] * 20), np.array([1])], [0.7, 0.3], 0)
    assert sorted(order[order < 41]) == list(range(41))


def test_an_unshuffled_blend_is_interleaved(two):
    train = open_corpus(["0.5", two[0], "0.5", two[1]], split="1").train
    half = np.searchsorted(np.cumsum(train.lengths), train.num_tokens // 2)
    tokens_of_a = sum(int(train.lengths[d]) for d in range(half) if train.describe(d).startswith(two[0]))
    assert tokens_of_a / train.lengths[:half].sum() == pytest.approx(0.5, abs=0.03)


def test_absurd_repetition_is_refused(tmp_path):
    big, small = make(tmp_path, "big", [900] * 100), make(tmp_path, "tiny", [1])
    with pytest.raises(CorpusError, match="repeat the small ones so often"):
        open_corpus(["0.0001", big, "0.9999", small], split="1")


def test_fingerprint_changes_with_everything_that_changes_the_documents(two, tmp_path):
    def fingerprint(*items, part="train", **kwargs):
        return getattr(open_corpus(list(items), **({"split": "80,20"} | kwargs)), part).fingerprint

    a, b = two
    blend = ("0.7", a, "0.3", b)
    found = [
        fingerprint(a),
        fingerprint(b),
        fingerprint(a, part="valid"),
        fingerprint(a, split="81,19"),
        fingerprint(a, b),
        fingerprint(b, a),
        fingerprint(*blend),
        fingerprint("0.6", a, "0.4", b),
        fingerprint(*blend, seed=2),
    ]
    assert len(set(found)) == len(found)
    assert fingerprint("7", a, "3", b) == fingerprint(*blend), "weights are relative"
    assert fingerprint(a, seed=2) == fingerprint(a), "the seed does nothing without a blend"
    moved = tmp_path / "moved"
    moved.mkdir()
    for ending in (".bin", ".idx"):
        (moved / f"x{ending}").write_bytes(open(a + ending, "rb").read())
    assert fingerprint(str(moved / "x")) == fingerprint(a)


def test_vocabulary_and_bounds(two):
    with pytest.raises(CorpusError, match="expected an id in the vocabulary, 0 to 99"):
        open_corpus(list(two), vocab_size=100)
    train = open_corpus([two[0]], vocab_size=1000).train
    for document in (-1, len(train)):
        with pytest.raises(CorpusError, match="the train corpus has documents 0 to"):
            train.tokens(document, 0, 1)
    with pytest.raises(CorpusError, match=f"document 0: tokens 0 to {train.lengths[0] + 1} asked for"):
        train.tokens(0, 0, int(train.lengths[0]) + 1)
    with pytest.raises(CorpusError, match="give a list"):
        open_corpus(two[0])


def test_a_corpus_travels_to_another_process(two):
    train = open_corpus(["0.7", two[0], "0.3", two[1]]).train
    copy = pickle.loads(pickle.dumps(train))
    assert copy.fingerprint == train.fingerprint and copy.tokens(5).tolist() == train.tokens(5).tolist()


def test_empty_documents_stay_in_lengths(shared):
    train = open_corpus([str(shared / "data" / "megatron" / "tiny_multiseq")], split="1").train
    assert train.lengths[:].tolist() == [6, 0, 2] and train.lengths.dtype == np.int64 and train.tokens(1, 0, 0).tolist() == []
