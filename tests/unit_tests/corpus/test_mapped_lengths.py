# SPDX-License-Identifier: Apache-2.0
"""Lengths and orders computed from mapped arrays: equal to arrays with an entry for each document, and to the fingerprints of old runs."""

import bisect
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.corpus import CorpusError, IndexedReader, computed_lengths, document_order, indexed_reader, length_counts, open_corpus
from megatron_dyn.corpus import corpus as corpus_module
from megatron_dyn.corpus.computed_lengths import Starts
from megatron_dyn.corpus.document_order import DocumentOrder
from megatron_dyn.corpus.inspect import corpus_facts
from megatron_dyn.corpus.length_counts import LengthCounts
from megatron_dyn.planning import PlanConfig, Planner, survey

# Of train, valid and test: the fingerprint, and that of order and lengths alone. As computed from whole arrays.
PINNED = {
    "one file": [
        ("00b715a54804b95dd6cb523ad40c6170", "ce83891c4bbce381f7484b0fc7c315d2"),
        ("ce4071b0295a5a3a14ea007c0f4a985b", "adce0262367ef270e8b7835d5ae04f87"),
        ("27408dd21814d93c807b9384cbae9da7", "22c514c925f0e91315e2f13846dc2535"),
    ],
    "several sequences": [
        ("bc99216c1cfbe1f6da975465ae41a031", "e07c36825330b56accd406b38b4a446e"),
        ("f7d90e719871c10fcf5d123392ede4c4", "2ac964b5c51c08ff4abd321858ddc5b5"),
        ("79ee8abb1e504f97b5c791b9d3457120", "57d5d9dec431a9a540830b7959cbec0a"),
    ],
    "no weights": [
        ("bdf87c46eaa15de79460a8c83ec81381", "df95e70e9cfe7790a97e78baf8ab8466"),
        ("b891e702ebde23f996d9db0d83bb613e", "307586da3fbf0abcc23ff55a5bc341a8"),
        ("a4ea3cdbfd843c7a86755ca3d938345f", "dcff55e9935377939bb3c44d64d03c13"),
    ],
    "one file twice": [
        ("94b34bfd97c6682540343ec68e1b6680", "8266fe3c8e986efa127656c322ec0b48"),
        ("da6b044e4cec5bb6c7a0a605a6a1a260", "d0f4efa2cd3bd6fcf6e7d2b15038bccd"),
        ("0fc04056e382c59c6be63dd66b01ec84", "366859850e14df38cfe63c3a3ec59498"),
    ],
    "weights": [
        ("c08a0b9a653d0f65d6fc2a2cd5462cbc", "efee6b3c3874cfd779146ea551dec251"),
        ("ab401df8ca00bb30584400d710a07b78", "de09b6f0e3dba5ed465d9176a655156b"),
        ("681366307a412dc05852e3d3f60a6137", "22d2c4f2895bb4dcecc6b997e821a408"),
    ],
    "weights, one file twice": [
        ("0733d64bdf480f787f445f43813f83c4", "5032413bf3f71e20191651e034ebefb0"),
        ("3f8b240729b9e86bc0b2b945b595c3dc", "7873b129446f178384f4dfed3467b5fe"),
        ("cafc69549d3efd36dda2dddf5744da29", "137832ac0f940d3a64787932b31e616f"),
    ],
    "one weight": [
        ("bc99216c1cfbe1f6da975465ae41a031", "e07c36825330b56accd406b38b4a446e"),
        ("f7d90e719871c10fcf5d123392ede4c4", "2ac964b5c51c08ff4abd321858ddc5b5"),
        ("79ee8abb1e504f97b5c791b9d3457120", "57d5d9dec431a9a540830b7959cbec0a"),
    ],
}


@pytest.fixture
def pairs(tmp_path, make_index):
    """Three pairs: documents of one sequence, some empty; of none to three sequences; of one sequence, 4-byte ids."""

    def write(name, lengths, document_indices, code, dtype, seed):
        size = np.dtype(dtype).itemsize
        pointers = [size * int(start) for start in np.cumsum([0, *lengths[:-1]])]
        ids = np.random.default_rng(seed).integers(0, 1000, sum(lengths)).astype(dtype)
        (tmp_path / f"{name}.idx").write_bytes(make_index(lengths, pointers, document_indices, code=code))
        (tmp_path / f"{name}.bin").write_bytes(ids.tobytes())
        return str(tmp_path / name)

    rng = np.random.default_rng(5)
    single = rng.integers(0, 40, 300).tolist()
    many = rng.integers(0, 30, 500).tolist()
    indices = [0, *np.cumsum(rng.integers(0, 4, 700))]
    indices = [int(index) for index in indices if index < 500] + [500, 500]
    other = rng.integers(1, 90, 120).tolist()
    return {
        "A": write("A", single, list(range(301)), 8, "<u2", 1),
        "M": write("M", many, indices, 8, "<u2", 2),
        "B": write("B", other, list(range(121)), 4, "<i4", 3),
    }


DATA_PATHS = {
    "one file": ["A"],
    "several sequences": ["M"],
    "no weights": ["A", "M", "B"],
    "one file twice": ["A", "B", "A"],
    "weights": ["0.5", "A", "0.2", "M", "0.3", "B"],
    "weights, one file twice": ["0.2", "M", "0.5", "B", "0.3", "M"],
    "one weight": ["1", "M"],
}


@pytest.mark.parametrize("name", DATA_PATHS)
def test_fingerprints_are_those_of_old_runs(pairs, name):
    splits = open_corpus([pairs.get(item, item) for item in DATA_PATHS[name]], split="80,15,5", seed=7)
    found = [(corpus.fingerprint, corpus.lengths_fingerprint) for corpus in (splits.train, splits.valid, splits.test)]
    assert found == PINNED[name]


def reference(pairs, name, part) -> tuple[list[tuple[str, int]], np.ndarray]:
    """(prefix, document) and length of each document of an epoch without weights, read entry by entry with struct."""
    found, lengths = [], []
    for item in DATA_PATHS[name]:
        content = Path(f"{pairs[item]}.idx").read_bytes()
        sequences, indices = struct.unpack_from("<QQ", content, 18)
        sizes = struct.unpack_from(f"<{sequences}i", content, 34)
        begins = struct.unpack_from(f"<{indices}q", content, 34 + 12 * sequences)
        edges = [round(share * (indices - 1)) for share in (0, 0.8, 0.95, 1)]
        for document in range(edges[part], edges[part + 1]):
            found.append((pairs[item], document))
            lengths.append(sum(sizes[begins[document] : begins[document + 1]]))
    return found, np.array(lengths)


def check_against_reference(pairs, name) -> None:
    splits = open_corpus([pairs.get(item, item) for item in DATA_PATHS[name]], split="80,15,5")
    for part, corpus in enumerate((splits.train, splits.valid, splits.test)):
        documents, lengths = reference(pairs, name, part)
        assert len(corpus) == len(lengths) and np.array_equal(corpus.lengths[:], lengths)
        assert [f"{prefix}, document {number}" for prefix, number in documents] == [corpus.describe(i) for i in range(len(corpus))]
        random = np.random.default_rng(part)
        for _ in range(20):
            begin, end = random.integers(-len(lengths), len(lengths), 2)
            some = random.integers(-len(lengths), len(lengths), (3, 5))
            assert np.array_equal(corpus.lengths[begin:end], lengths[begin:end]) and np.array_equal(corpus.lengths[end::3], lengths[end::3])
            assert np.array_equal(corpus.lengths[some], lengths[some]) and corpus.lengths[int(begin)] == lengths[begin]
        for document in random.integers(0, len(lengths), 10).tolist():
            assert len(corpus.tokens(document)) == lengths[document]
        assert corpus.num_tokens == lengths.sum() and corpus.num_different_documents == len(set(documents))
        assert f"{len(lengths)} documents ({np.count_nonzero(lengths == 0)} empty)" in corpus.report()[0]
        for outside in (len(lengths), -len(lengths) - 1, np.array([0, len(lengths)])):
            with pytest.raises(IndexError):
                corpus.lengths[outside]


UNWEIGHTED = [name for name, path in DATA_PATHS.items() if set(path) <= {"A", "M", "B"}]


@pytest.mark.parametrize("few", [0, 8])
@pytest.mark.parametrize("name", UNWEIGHTED)
def test_lengths_are_those_of_the_index(pairs, monkeypatch, name, few):
    monkeypatch.setattr(document_order, "FEW", few)
    check_against_reference(pairs, name)


def without_the_end(self, documents):
    return self._pointers[np.minimum(self._indices[documents], len(self._pointers) - 1)] >> self._shift


@pytest.mark.parametrize(
    ("owner", "method", "broken", "name"),
    [
        (Starts, "at", without_the_end, "several sequences"),
        (DocumentOrder, "_documents_of", lambda self, places, files: places, "no weights"),
        (DocumentOrder, "one", lambda self, place: (bisect.bisect_left(self._bounds, place) - 1, place), "no weights"),
    ],
)
def test_broken_lengths_are_noticed(pairs, monkeypatch, owner, method, broken, name):
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises((AssertionError, IndexError)):
        check_against_reference(pairs, name)


@pytest.mark.parametrize("name", ["weights", "weights, one file twice"])
def test_a_weighted_blend_is_consistent(pairs, name):
    train = open_corpus([pairs.get(item, item) for item in DATA_PATHS[name]], split="80,20").train
    readers = {prefix: IndexedReader(prefix) for prefix in pairs.values()}
    named = [train.describe(i).split(", document ") for i in range(len(train))]
    lengths = np.array([readers[prefix].lengths[int(number)] for prefix, number in named])
    assert np.array_equal(np.asarray(train.lengths), lengths) and train.num_tokens == lengths.sum()
    assert train.num_different_documents == len(set(map(tuple, named)))
    some = np.random.default_rng(0).integers(0, len(train), 50)
    assert np.array_equal(train.lengths[some], lengths[some]) and np.array_equal(train.lengths[7:90], lengths[7:90])


@pytest.fixture
def large(tmp_path):
    """Pairs of 300,000 documents, of one sequence and of two."""
    count, random = 300_000, np.random.default_rng(2)
    for name, each in (("L", 1), ("N", 2)):
        lengths = random.integers(0, 60, count * each).astype("<i4")
        ends = np.cumsum(lengths, dtype="<i8")
        with open(tmp_path / f"{name}.idx", "wb") as stream:
            stream.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, count * each, count + 1))
            for part in (lengths, ends - lengths, np.arange(count + 1, dtype="<i8") * each):
                stream.write(part.tobytes())
    return str(tmp_path / "L"), str(tmp_path / "N")


@pytest.mark.parametrize("names", ["L", "N", "LNL"])
def test_no_array_with_an_entry_for_each_document(large, monkeypatch, names):
    """36 bytes a document would be 10 MiB and more: opened, planned and reported on in less than 1 MiB, chunks being small."""
    for module in (corpus_module, computed_lengths, survey):
        monkeypatch.setattr(module, "CHUNK", 1 << 12)
    monkeypatch.setattr(corpus_module, "DIGEST_CHUNK", 1 << 12)
    monkeypatch.setattr(indexed_reader, "CHECK_CHUNK", 1 << 12)
    monkeypatch.setattr(length_counts, "COUNTED", 1 << 12)
    config = PlanConfig(max_tokens_per_microbatch=2048, global_batch_size=256, data_parallel_size=2)
    path = [large["LN".index(name)] for name in names]
    Planner(np.arange(1000), config).plan(1)  # whatever is made once
    tracemalloc.start()
    try:
        splits = open_corpus(path, read_tokens=False)
        planner = Planner(splits.train.lengths, config, fingerprint=splits.train.fingerprint)
        plan = planner.plan(3)
        LengthCounts(splits.train.lengths).quantiles([0.5])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 1 << 20
    assert plan.digest == Planner(np.asarray(splits.train.lengths), config, fingerprint=splits.train.fingerprint).plan(3).digest


def test_a_weighted_blend_keeps_four_bytes_a_document(large):
    tracemalloc.start()
    try:
        splits = open_corpus(["0.5", large[0], "0.5", large[1]], split="1", read_tokens=False)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 4 * len(splits.train) < kept < 4.5 * len(splits.train)


def test_a_corpus_of_several_sequences_travels_and_names_wrong_ids(pairs):
    train = open_corpus([pairs["M"], pairs["A"]], split="1").train
    copy = pickle.loads(pickle.dumps(train))
    assert copy.lengths_fingerprint == train.lengths_fingerprint and copy.tokens(5).tolist() == train.tokens(5).tolist()
    planner = pickle.loads(pickle.dumps(Planner(train.lengths, PlanConfig(max_tokens_per_microbatch=200, global_batch_size=9))))
    assert np.array_equal(planner.lengths[:], train.lengths[:])
    reader = IndexedReader(pairs["M"])
    ids = np.concatenate([reader.tokens(i) for i in range(len(reader))])
    at = int((ids >= 900).argmax())
    document = int(np.searchsorted(np.cumsum(reader.lengths[:]), at, side="right"))
    with pytest.raises(CorpusError, match=f"document {document}, token {at - int(reader.lengths[:document].sum())}: found id {ids[at]}"):
        IndexedReader(pairs["M"], vocab_size=900)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40) | st.integers(0, 5 << 20), min_size=1, max_size=60), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_quantiles_are_numpys(lengths, shares):
    found = LengthCounts(np.array(lengths))
    assert found.documents == len(lengths) and np.array_equal(np.repeat(found.lengths, found.counts), sorted(lengths))
    assert found.quantiles(shares, method="lower").tolist() == np.quantile(lengths, shares, method="lower").tolist()
    assert found.quantiles(shares) == pytest.approx(np.quantile(lengths, shares), rel=1e-12)
    full = LengthCounts(np.array(lengths), empty=False)
    assert full.documents == np.count_nonzero(lengths)


def test_inspect_says_what_numpy_says(pairs):
    facts = dict(corpus_facts(pairs["M"], None))
    lengths = IndexedReader(pairs["M"]).lengths[:]
    percentiles = ", ".join(f"p{p} {np.percentile(lengths, p):.0f}" for p in (1, 10, 50, 90, 99))
    assert facts["tokens per document"] == f"min {lengths.min()}, {percentiles}, max {lengths.max()}, mean {lengths.mean():.1f}"
    assert facts["longest document"] == str(lengths.argmax()) and facts["documents"] == f"{len(lengths)} ({(lengths == 0).sum()} empty)"
