# SPDX-License-Identifier: Apache-2.0
"""The strict reader: what must open, what must be refused and how it is said."""

import os
import random
import struct
import tracemalloc

import numpy as np
import pytest

from megatron_dyn.corpus import CorpusError, IndexedReader, IndexedWriter
from megatron_dyn.corpus import indexed_reader


def write_pair(folder, index: bytes, tokens: bytes, name="pair") -> str:
    prefix = str(folder / name)
    for ending, content in ((".idx", index), (".bin", tokens)):
        path = folder / f"{name}{ending}"
        path.unlink(missing_ok=True)  # some file systems flush a file that is truncated and written again: slow
        path.write_bytes(content)
    return prefix


REFUSED_CASES = {
    "m01_bad_magic": [".idx", "magic", "TNTIDX", "MMIDIDX"],
    "m03b_float_dtype7": [".idx", "dtype code", "7 (float32)", "integer"],
    "m04b_truncated_idx_arrays": [".idx", "file size", "106 bytes", "122 bytes"],
    "m06_truncated_bin": [".bin", "file size", "18 bytes", "20 bytes"],
    "m08_negative_length": [".idx", "length of sequence 1", "-1"],
    "m09_pointer_wrapped_int32": [".idx", "pointer of sequence 2", "-2147483642", "6 bytes", "wrapped"],
    "m11b_docidx_first_ne_0": [".idx", "document index 0", "found 1", "expected 0"],
    "m14_zero_sequences": [".idx", "number of sequences", "found 0", "at least 1"],
}


@pytest.mark.parametrize("name", REFUSED_CASES)
def test_case_is_refused_with_file_entry_found_and_expected(shared, name):
    with pytest.raises(CorpusError) as caught:
        IndexedReader(shared / "cases" / "indexed" / name)
    for part in [name, *REFUSED_CASES[name]]:
        assert part in str(caught.value)


def test_every_case_file_is_either_valid_or_listed(shared):
    names = {path.stem for path in (shared / "cases" / "indexed").glob("*.idx")}
    assert names == {"valid", *REFUSED_CASES}


def test_legal_files_open(shared):
    valid = IndexedReader(shared / "cases" / "indexed" / "valid")
    assert [valid.tokens(i).tolist() for i in range(len(valid))] == [[10, 11, 12], [], [13, 14, 15, 16, 17], [18, 19]]
    multiseq = IndexedReader(shared / "data" / "megatron" / "tiny_multiseq")
    assert [multiseq.tokens(i).tolist() for i in range(3)] == [[5, 6, 7, 8, 9, 2], [], [3, 2]]
    assert multiseq.lengths[:].tolist() == [6, 0, 2] and multiseq.num_sequences == 3
    multimodal = IndexedReader(shared / "data" / "megatron" / "tiny_multimodal")
    assert [multimodal.tokens(i).tolist() for i in range(2)] == [[5, 6, 7], [8, 9]] and len(multimodal.modes) == 2
    mix = IndexedReader(shared / "data" / "megatron" / "mix_heavytail_mistral_v1", vocab_size=32000)
    assert (len(mix), mix.num_tokens, int(mix.lengths.max())) == (4075, 1218125, 68652)


GOOD = dict(lengths=[3, 0, 2], pointers=[0, 12, 12], document_indices=[0, 1, 1, 3])
TOKENS = np.array([1, 2, 3, 4, 5], "<i4").tobytes()


def test_hand_made_index_opens(tmp_path, make_index):
    reader = IndexedReader(write_pair(tmp_path, make_index(**GOOD), TOKENS))
    assert [reader.tokens(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4, 5]]
    assert reader.tokens(0, 1, 2).tolist() == [2, 3] and reader.tokens(0).dtype == np.int64


@pytest.mark.parametrize(
    ("change", "tokens", "parts"),
    [
        (dict(version=2), TOKENS, ["version", "found 2", "expected 1"]),
        (dict(code=0), TOKENS, ["dtype code", "0 (an unknown code)"]),
        (dict(code=6), TOKENS, ["dtype code", "6 (float64)"]),
        (dict(code=9), TOKENS, ["dtype code", "9 (an unknown code)"]),
        (dict(pointers=[0, 12, 8]), TOKENS, ["pointer of sequence 2", "found 8", "expected 12"]),
        (dict(pointers=[4, 12, 12]), TOKENS, ["pointer of sequence 0", "found 4", "expected 0"]),
        (dict(document_indices=[0, 2, 1, 3]), TOKENS, ["document index 2", "found 1", "at least 2"]),
        (dict(document_indices=[0, 1, 1, 2]), TOKENS, ["document index 3 (the last)", "found 2", "expected 3"]),
        (dict(document_indices=[0, 1, 1, 4]), TOKENS, ["document index 3 (the last)", "found 4", "expected 3"]),
        (dict(document_indices=[0]), TOKENS, ["number of document indices", "found 1"]),
        (dict(counts=(3, 2**61)), TOKENS, ["file size", "102 bytes"]),
        (dict(counts=(2**64 - 1, 2**64 - 1)), TOKENS, ["file size", "102 bytes"]),
        (dict(modes=b"\0\0"), TOKENS, ["file size", "104 bytes", "102 bytes (105 with modes)"]),
        (dict(), TOKENS + b"\0\0\0\0", [".bin", "24 bytes", "20 bytes"]),
        (dict(), TOKENS[:-1], [".bin", "19 bytes", "20 bytes"]),
        (dict(), b"", [".bin", "0 bytes", "20 bytes"]),
        (dict(lengths=[0, 0, 0], pointers=[0, 0, 0]), b"", [".bin", "All documents are empty"]),
    ],
)
def test_one_wrong_entry_is_named(tmp_path, make_index, change, tokens, parts):
    prefix = write_pair(tmp_path, make_index(**(GOOD | change)), tokens)
    with pytest.raises(CorpusError) as caught:
        IndexedReader(prefix)
    for part in parts:
        assert part in str(caught.value)


def test_counts_of_the_header_never_size_an_allocation(tmp_path, make_index):
    prefix = write_pair(tmp_path, make_index(**(GOOD | dict(counts=(2**33, 2**33)))), TOKENS)
    tracemalloc.start()
    try:
        with pytest.raises(CorpusError):
            IndexedReader(prefix)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_missing_files_say_what_to_do(tmp_path, make_index):
    with pytest.raises(CorpusError, match=r"nothing\.idx: cannot be opened .*prefix of the pair"):
        IndexedReader(tmp_path / "nothing")
    prefix = write_pair(tmp_path, make_index(**GOOD), TOKENS)
    with pytest.raises(CorpusError, match="without its ending"):
        IndexedReader(prefix + ".idx")
    os.rename(prefix + ".idx", prefix + ".idx.partial")
    os.rename(prefix + ".bin", prefix + ".bin.partial")
    with pytest.raises(CorpusError, match="unfinished or interrupted"):
        IndexedReader(prefix)
    os.mkdir(prefix + ".idx")
    with pytest.raises(CorpusError, match="not a regular file"):
        IndexedReader(prefix)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_every_integer_dtype(tmp_path, dtype):
    with IndexedWriter(tmp_path / "all", dtype=dtype) as writer:
        writer.add_document([1, 2, 100])
    reader = IndexedReader(tmp_path / "all")
    assert reader.dtype == np.dtype(dtype) and reader.tokens(0).tolist() == [1, 2, 100]


def test_vocabulary_is_checked_at_open_and_names_the_token(tmp_path):
    with IndexedWriter(tmp_path / "v", dtype=np.int32) as writer:
        writer.add_document([1, 2])
        writer.add_document([])
        writer.add_document([3, 400, 5])
    assert IndexedReader(tmp_path / "v", vocab_size=401).scanned
    with pytest.raises(CorpusError, match=r"v\.bin: document 2, token 1: found id 400, expected an id in the vocabulary, 0 to 399"):
        IndexedReader(tmp_path / "v", vocab_size=400)


def test_negative_ids_are_refused_without_a_vocabulary(tmp_path, make_index):
    tokens = np.array([1, 2, 3, -1, 5], "<i4").tobytes()
    with pytest.raises(CorpusError, match=r"document 2, token 0: found id -1"):
        IndexedReader(write_pair(tmp_path, make_index(**GOOD), tokens))


def test_a_file_too_big_to_scan_is_checked_on_each_read(tmp_path, monkeypatch):
    with IndexedWriter(tmp_path / "big", dtype=np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 500])
    monkeypatch.setattr(indexed_reader, "SCAN_AT_OPEN_BYTES", 8)
    reader = IndexedReader(tmp_path / "big", vocab_size=100)
    assert not reader.scanned
    assert reader.tokens(0).tolist() == [1, 2, 3] and reader.tokens(1, 0, 1).tolist() == [4]
    with pytest.raises(CorpusError, match="document 1, token 1: found id 500"):
        reader.tokens(1)
    with pytest.raises(CorpusError, match="document 1, token 1: found id 500"):
        IndexedReader(tmp_path / "big", vocab_size=100, scan=True)


def test_checks_in_chunks_see_what_one_look_sees(tmp_path, make_index, monkeypatch):
    monkeypatch.setattr(indexed_reader, "CHECK_CHUNK", 2)
    monkeypatch.setattr(indexed_reader, "SCAN_CHUNK", 2)
    assert [IndexedReader(write_pair(tmp_path, make_index(**GOOD), TOKENS)).tokens(i).tolist() for i in range(3)] == [[1, 2, 3], [], [4, 5]]
    for change, entry in (
        (dict(lengths=[3, 0, -2]), "length of sequence 2"),
        (dict(pointers=[0, 12, 0]), "pointer of sequence 2"),
        (dict(document_indices=[0, 1, 3, 2]), "document index 3"),
    ):
        with pytest.raises(CorpusError, match=entry):
            IndexedReader(write_pair(tmp_path, make_index(**(GOOD | change)), TOKENS))
    with pytest.raises(CorpusError, match="document 2, token 1: found id 5"):
        IndexedReader(write_pair(tmp_path, make_index(**GOOD), TOKENS), vocab_size=5)
    early = dict(lengths=[9, 9, 9, 9, 9], pointers=[0, 36, 72, 108, 144], document_indices=[0, 5])
    with pytest.raises(CorpusError, match="found 20 bytes, expected at least 72 bytes"):  # the sum stops there: it can never overflow
        IndexedReader(write_pair(tmp_path, make_index(**early), TOKENS))


@pytest.mark.parametrize("slice_", [(0, 2, 2), (0, -1, 2), (0, 0, -1), (0, 4, 0), (3, 0, 0), (-1, 0, 0)])
def test_a_slice_outside_its_document_is_refused(tmp_path, make_index, slice_):
    reader = IndexedReader(write_pair(tmp_path, make_index(**GOOD), TOKENS))
    with pytest.raises(CorpusError):
        reader.tokens(*slice_)


@pytest.fixture
def sparse_pair(tmp_path):
    """Three sequences of 600,000,000 int32 tokens in a sparse file; only the last four tokens are set."""
    with open(tmp_path / "huge.bin", "wb") as stream:
        stream.truncate(7_200_000_000)
        stream.seek(-16, os.SEEK_END)
        stream.write(struct.pack("<4i", 11, 12, 13, 14))
    return str(tmp_path / "huge")


def test_offsets_beyond_two_gigabytes(sparse_pair, make_index):
    lengths, right = [600_000_000] * 3, [0, 2_400_000_000, 4_800_000_000]
    with open(sparse_pair + ".idx", "wb") as stream:
        stream.write(make_index(lengths, right, [0, 1, 2, 3]))
    reader = IndexedReader(sparse_pair, vocab_size=14)
    assert reader.num_tokens == 1_800_000_000 and not reader.scanned
    assert reader.tokens(2, 599_999_995, 4).tolist() == [0, 11, 12, 13]
    with pytest.raises(CorpusError, match="document 2, token 599999999: found id 14"):
        reader.tokens(2, 599_999_990)
    assert len(reader.fingerprint) == 32
    with open(sparse_pair + ".idx", "wb") as stream:
        stream.write(make_index(lengths, [0, -1_894_967_296, 505_032_704], [0, 1, 2, 3]))
    with pytest.raises(CorpusError, match=r"pointer of sequence 1: found -1894967296, expected 2400000000 bytes.*wrapped"):
        IndexedReader(sparse_pair)


def test_more_than_two_giga_tokens(tmp_path, make_index):
    """Token offsets, and not only byte offsets, pass 2^31: three sequences of 1.5e9 tokens of one byte."""
    each = 1_500_000_000
    with open(tmp_path / "many.bin", "wb") as stream:
        stream.truncate(3 * each)
        stream.seek(-3, os.SEEK_END)
        stream.write(bytes([7, 8, 9]))
    (tmp_path / "many.idx").write_bytes(make_index([each] * 3, [0, each, 2 * each], [0, 1, 2, 3], code=1))
    reader = IndexedReader(tmp_path / "many", vocab_size=10)
    assert reader.num_tokens == 3 * each
    assert reader.tokens(2, each - 4, 4).tolist() == [0, 7, 8, 9]
    assert reader.tokens(1, 0, 2).tolist() == [0, 0]


def test_writer_and_stock_reader_agree_beyond_two_gigabytes(sparse_pair):
    """Pointers of our writer (its lengths set as if 7.2 GB had been written) equal 64-bit arithmetic."""
    writer = IndexedWriter(sparse_pair + "_out", dtype=np.int32)
    writer._lengths.extend([600_000_000] * 3)
    writer._document_ends.extend([1, 2, 3])
    with open(sparse_pair + ".idx", "wb") as stream:
        writer._write_index(stream)
    writer.abort()
    assert IndexedReader(sparse_pair).tokens(2, 599_999_996).tolist() == [11, 12, 13, 14]


def test_mutated_index_opens_equal_or_is_refused(tmp_path, make_index):
    """3,000 mutations and every truncation: nothing but CorpusError, never other tokens."""
    rng = random.Random(7)
    good = make_index(**GOOD, modes=b"\1\0\1")
    prefix = write_pair(tmp_path, good, TOKENS)
    every_token = IndexedReader(prefix)._tokens.astype(np.int64).tolist()
    opened = refused = 0
    mutants = [good[:size] for size in range(len(good))]
    for _ in range(3000):
        mutant = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            mutant[rng.randrange(len(good))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
        mutants.append(bytes(mutant) + bytes(rng.choice((0, 0, 0, 1, 8))))
    for mutant in mutants:
        os.unlink(prefix + ".idx")
        (tmp_path / "pair.idx").write_bytes(mutant)
        try:
            reader = IndexedReader(prefix)
            found = np.concatenate([reader.tokens(i) for i in range(len(reader))]).tolist()
            assert reader.fingerprint
        except CorpusError:
            refused += 1
        else:
            opened += 1
            assert found == every_token
    assert refused > 1500 and opened > 20


def test_fingerprint_follows_content_and_not_place(tmp_path):
    def made(name, documents, dtype=np.int32):
        with IndexedWriter(tmp_path / name, dtype=dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return IndexedReader(tmp_path / name).fingerprint

    first = made("a", [[1, 2], [3]])
    assert made("b", [[1, 2], [3]]) == first
    assert len({first, made("c", [[1], [2, 3]]), made("d", [[3], [1, 2]]), made("e", [[1, 2], [4]]), made("f", [[1, 2], [3], []])}) == 5


def test_fingerprint_of_a_sampled_file_sees_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_reader, "SCAN_AT_OPEN_BYTES", 8)
    monkeypatch.setattr(indexed_reader, "SAMPLE_BYTES", 8)
    found = set()
    for first, last in ((0, 0), (1, 0), (0, 1)):
        with IndexedWriter(tmp_path / "s", dtype=np.int32) as writer:
            writer.add_document([first] + [0] * 5000 + [last])
        found.add(IndexedReader(tmp_path / "s").fingerprint)
    assert len(found) == 3
