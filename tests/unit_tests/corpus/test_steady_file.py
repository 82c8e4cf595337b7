# SPDX-License-Identifier: Apache-2.0
"""Files that change under the reader, each in a process of its own: a cut map would take the test runner down."""

import faulthandler
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_dyn.corpus import CorpusError, IndexedWriter, open_corpus, steady_file
from megatron_dyn.corpus.indexed_reader import IndexedReader
from megatron_dyn.microbatch import StepStream
from megatron_dyn.microbatch.stream import StreamError
from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "functional_tests"))
from launch import launch, outcomes  # noqa: E402

DOCUMENT = list(range(3, 60))


def written(folder: Path) -> Path:
    with IndexedWriter(folder / "corpus", vocab_size=61) as writer:
        for _ in range(200):
            writer.add_document(np.array(DOCUMENT))
    return folder / "corpus.bin"


def overwrite(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.write(b"\x01\x00")


CHANGES = {
    "cut": lambda path: os.truncate(path, 100),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 2),
    "overwritten": overwrite,
    "touched": lambda path: os.utime(path),
    "deleted": lambda path: path.unlink(),
    "replaced": lambda path: ((path.parent / "other").write_bytes(b"\x01\x00" * 9), os.replace(path.parent / "other", path)),
}


def read_after(change: str, path: Path) -> str:
    reader = IndexedReader(str(path.with_suffix("")), vocab_size=61)
    assert reader.fingerprint and reader.tokens(0).tolist() == DOCUMENT
    time.sleep(0.02)  # so that the time of change is another
    CHANGES[change](path)
    for file in reader._files:
        file._next_look = 0.0

    def answer() -> str:
        try:
            return "same" if all(reader.tokens(n).tolist() == DOCUMENT for n in (199, 0)) else "other"
        except CorpusError as error:
            return str(error)

    first = answer()
    assert answer() == first, "what was refused once is refused again"
    return first


def shift_lengths(path: Path) -> None:
    """Another index of as many tokens: one document longer, the next one shorter."""
    data = bytearray(path.read_bytes())
    lengths = np.frombuffer(data, "<i4", 200, 34)
    lengths[:2] += np.array([5, -5], dtype=np.int32)
    np.frombuffer(data, "<i8", 200, 34 + 800)[1] += 5 * 2
    with open(path, "r+b") as stream:
        stream.write(data)


CHANGES["shifted"] = shift_lengths


@pytest.mark.parametrize(
    "change, says",
    [("cut", "and has 100 now"), ("longer", "bytes when the run opened it"), ("overwritten", "was overwritten"), ("touched", "same"),
     ("deleted", "same"), ("replaced", "same")],
)  # fmt: skip
def test_a_file_that_changes_is_refused_and_one_that_only_looks_so_is_not(tmp_path, change, says):
    path = written(tmp_path)
    answer = launch(1, lambda rank, world: read_after(change, path), process_group=False)[0]
    assert answer == says if says == "same" else (says in answer and str(path) in answer and "never over it" in answer)


@pytest.mark.parametrize("change, says", [("cut", "and has 100 now"), ("shifted", "was overwritten"), ("touched", "same"), ("replaced", "same")])
def test_the_same_of_the_index(tmp_path, change, says):
    path = written(tmp_path).with_suffix(".idx")
    answer = launch(1, lambda rank, world: read_after(change, path), process_group=False)[0]
    assert answer == says if says == "same" else (says in answer and str(path) in answer and "never over it" in answer)


def test_lengths_alone_are_looked_at_before_a_step_is_planned(tmp_path):
    path = written(tmp_path).with_suffix(".idx")
    corpus = open_corpus([str(path.with_suffix(""))], split="100", read_tokens=False).train
    corpus.look()
    time.sleep(0.02)
    shift_lengths(path)
    corpus._readers[0]._files[0]._next_look = 0.0
    config = PlanConfig(max_tokens_per_microbatch=64, global_batch_size=4, data_parallel_size=1)
    stream = StepStream(TokenBudgetBatchSampler(Planner(corpus.lengths, config)), corpus, data_parallel_rank=0, prefetch_steps=0, plans_only=True)
    with stream, pytest.raises(StreamError) as refused:
        stream.next()
    assert "was overwritten" in str(refused.value.__cause__)


def test_mutant_without_a_look_a_cut_file_kills_the_process(tmp_path, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setattr(steady_file.SteadyFile, "look", lambda self: None)
    # What lies on the first page would be read as zeros, in silence; what lies behind it ends the process.

    def job(rank, world):
        faulthandler.disable()  # the stack of a death that is wanted
        return read_after("cut", path)

    assert "exit code -7" in outcomes(1, job, process_group=False)[0].error  # SIGBUS
    path = written(tmp_path)
    assert launch(1, lambda rank, world: read_after("overwritten", path), process_group=False) == ["other"]
