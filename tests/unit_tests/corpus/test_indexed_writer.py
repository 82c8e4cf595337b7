# SPDX-License-Identifier: Apache-2.0
"""The atomic writer, against Megatron's own reader and builder, and under interruption at every step."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from megatron_dyn.corpus import CorpusError, IndexedReader, IndexedWriter
from megatron_dyn.corpus.indexed_format import dtype_for_vocabulary

sequences = st.lists(st.integers(0, 255), max_size=20)
documents = st.lists(st.lists(sequences, max_size=4), min_size=1, max_size=8).filter(lambda docs: any(seq for doc in docs for seq in doc))


@settings(max_examples=60, deadline=None)
@given(documents, st.sampled_from([np.uint8, np.int16, np.uint16, np.int32, np.int64]))
def test_round_trip_through_our_reader_and_megatrons(documents, dtype):
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/ours"
        with IndexedWriter(prefix, dtype=dtype) as writer:
            for document in documents:
                writer.add_document([token for seq in document for token in seq], [len(seq) for seq in document])
        ours = IndexedReader(prefix)
        assert [ours.tokens(i).tolist() for i in range(len(ours))] == [[t for seq in doc for t in seq] for doc in documents]
        assert ours.lengths[:].tolist() == [sum(map(len, doc)) for doc in documents]
        stock = IndexedDataset(prefix)
        assert [stock[i].tolist() for i in range(len(stock))] == [seq for doc in documents for seq in doc]
        assert stock.document_indices.tolist() == np.cumsum([0] + [len(doc) for doc in documents]).tolist()

        builder = IndexedDatasetBuilder(f"{folder}/theirs.bin", dtype=dtype)
        for document in documents:
            builder.add_document([t for seq in document for t in seq], [len(seq) for seq in document])
        builder.finalize(f"{folder}/theirs.idx")
        for ending in (".bin", ".idx"):
            assert Path(prefix + ending).read_bytes() == Path(f"{folder}/theirs{ending}").read_bytes()


def test_many_documents_at_once_equal_one_by_one(tmp_path):
    with IndexedWriter(tmp_path / "one", vocab_size=100) as writer:
        for document in ([1, 2], [], [3]):
            writer.add_document(document)
    with IndexedWriter(tmp_path / "many", vocab_size=100) as writer:
        writer.add_documents(np.array([1, 2, 3], np.uint16), [2, 0, 1])
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "many.idx").read_bytes()
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "many.bin").read_bytes()


@pytest.mark.parametrize("vocab_size", [1, 256, 65499, 65500, 65536, 128000])
def test_dtype_is_megatrons(vocab_size):
    assert dtype_for_vocabulary(vocab_size) == np.dtype(DType.optimal_dtype(vocab_size))


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([1, 100], None, "id 100 is outside 0 to 99"),
        ([1, -1], None, "id -1 is outside"),
        ([1.5], None, "list of integers"),
        ([[1], [2]], None, "list of integers"),
        ([1, 2], [1], "do not add up"),
        ([1], [2, -1], "do not add up"),
    ],
)
def test_wrong_documents_are_refused_and_nothing_is_left(tmp_path, ids, lengths, message):
    with pytest.raises(CorpusError, match=message):
        with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
            writer.add_document([1, 2])
            writer.add_document(ids, lengths)
    assert list(tmp_path.iterdir()) == []


def test_ids_that_the_dtype_cannot_hold_are_refused_before_writing(tmp_path):
    with pytest.raises(CorpusError, match="holds ids below 256"):
        IndexedWriter(tmp_path / "out", vocab_size=1000, dtype=np.uint8)
    with pytest.raises(CorpusError, match="float32 cannot hold tokens"):
        IndexedWriter(tmp_path / "out", dtype=np.float32)
    with pytest.raises(CorpusError, match="needs vocab_size or dtype"):
        IndexedWriter(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_no_tokens_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(CorpusError, match="no tokens to write"):
        with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
            writer.add_document([])
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_of_the_prefix_is_refused_and_harmless(tmp_path):
    with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
        writer.add_document([1, 2, 3])
        with pytest.raises(CorpusError, match="another run is writing"):
            IndexedWriter(tmp_path / "out", vocab_size=100)
    assert IndexedReader(tmp_path / "out").tokens(0).tolist() == [1, 2, 3]


def test_partial_files_of_a_killed_run_are_replaced(tmp_path):
    (tmp_path / "out.bin.partial").write_bytes(b"old " * 100)
    (tmp_path / "out.idx.partial").write_bytes(b"old " * 100)
    with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
        writer.add_document([4])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.bin", "out.idx"]
    assert IndexedReader(tmp_path / "out").tokens(0).tolist() == [4]


def write_and_die(prefix: str, system_call: int) -> bool:
    """Writes [7, 8, 9] in a child that SIGKILLs itself instead of its n-th file operation; whether it was killed."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == system_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink", "open"):
        setattr(os, name, counted(getattr(os, name)))
    with IndexedWriter(prefix, vocab_size=100) as writer:
        writer.add_document([7, 8, 9])
    os._exit(0)


@pytest.mark.parametrize("old", [False, True], ids=["fresh", "over an older pair"])
def test_a_kill_at_any_step_leaves_old_new_or_nothing_readable(tmp_path, old):
    prefix = str(tmp_path / "out")
    older = [[1], [2, 3]]  # as many tokens as the new document: a mixture of both pairs would open
    outcomes = []
    for step in range(1, 40):
        for path in tmp_path.iterdir():
            path.unlink()
        if old:
            with IndexedWriter(prefix, vocab_size=100) as writer:
                for document in older:
                    writer.add_document(document)
        killed = write_and_die(prefix, step)
        try:
            reader = IndexedReader(prefix)
            outcomes.append([reader.tokens(i).tolist() for i in range(len(reader))])
        except CorpusError:
            outcomes.append(None)
            assert not os.path.exists(prefix + ".idx"), "an index alone looks finished"
        assert outcomes[-1] in ([[7, 8, 9]], older if old else None, None)
        with IndexedWriter(prefix, vocab_size=100) as writer:  # and the next run just works
            writer.add_document([5])
        assert IndexedReader(prefix).tokens(0).tolist() == [5]
        if not killed:
            break
    assert not killed and step > 5 and outcomes[-1] == [[7, 8, 9]]
    assert outcomes[0] == (older if old else None)


def test_a_partial_file_renamed_while_we_waited_is_not_emptied(tmp_path, monkeypatch):
    """Another run finishes between our opening of its partial file and our lock on it."""
    with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
        writer.add_document([1, 2])
    os.rename(tmp_path / "out.bin", tmp_path / "out.bin.partial")
    real = fcntl.flock

    def late_lock(stream, operation):
        os.rename(tmp_path / "out.bin.partial", tmp_path / "out.bin")
        (tmp_path / "out.bin.partial").touch()  # and a third run has begun
        real(stream, operation)

    monkeypatch.setattr(fcntl, "flock", late_lock)
    with pytest.raises(CorpusError, match="another run is writing"):
        IndexedWriter(tmp_path / "out", vocab_size=100)
    assert IndexedReader(tmp_path / "out").tokens(0).tolist() == [1, 2]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch, failing):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(CorpusError, match="out: could not be written .No space left"):
        with IndexedWriter(tmp_path / "out", vocab_size=100) as writer:
            writer.add_document([1])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for the disk; in a process of its own, because the limit stays."""
    code = (
        "import resource, signal, sys\n"
        "from megatron_dyn.corpus import CorpusError, IndexedWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with IndexedWriter(sys.argv[1], vocab_size=10) as writer:\n"
        "        for _ in range(100): writer.add_document([1] * 5000)\n"
        "except CorpusError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "corpus")], capture_output=True, text=True, timeout=60)
    assert f"{tmp_path}/corpus: could not be written" in ended.stdout, ended.stderr
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".bin", ".idx")]
