# SPDX-License-Identifier: Apache-2.0
"""Preprocessing: the reference's bytes, any number of workers, kills and bad input, through the function and the command."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_dyn.corpus import CorpusError, IndexedReader, SentencePieceTokenizer, preprocess as preprocessing
from megatron_dyn.corpus.inputs import InputSelection
from megatron_dyn.corpus.preprocess import PreprocessConfig, preprocess
from megatron_dyn.corpus.workers import WorkerPool

REPOSITORY = Path(preprocessing.__file__).resolve().parents[2]


def config(inputs, model, prefix, *, selection=None, **kwargs) -> PreprocessConfig:
    inputs = [str(item) for item in inputs]
    return PreprocessConfig(
        selection=InputSelection(inputs=inputs, **(selection or {})), tokenizer_model=str(model), output_prefix=str(prefix), **kwargs
    )


def command(*arguments, **kwargs) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_dyn", *map(str, arguments)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def both_files(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def finished_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx"))


def test_the_reference_files_byte_for_byte(shared, tmp_path):
    data = shared / "data"
    report = preprocess(
        config([data / "mix_heavytail.jsonl"], data / "tokenizers" / "mistral_v1_32k.model", tmp_path / "mix", append_eod=True, on_empty="keep", workers=2)
    )
    assert both_files(tmp_path / "mix") == both_files(data / "megatron" / "mix_heavytail_mistral_v1")
    assert (report.documents, report.tokens, report.empty, report.dtype, report.unknown) == (4075, 1218125, 51, "uint16", 0)


def test_same_bytes_for_any_number_of_workers_and_any_reader(tmp_path, jsonl_file, tokenizer_model, monkeypatch):
    monkeypatch.setattr(preprocessing, "BATCH_BYTES", 5000)  # many batches
    reports = [preprocess(config([jsonl_file], tokenizer_model, tmp_path / f"w{n}", append_eod=True, workers=n)) for n in (1, 2, 3)]
    assert reports[0] == reports[1] == reports[2]
    assert both_files(tmp_path / "w1") == both_files(tmp_path / "w2") == both_files(tmp_path / "w3")
    monkeypatch.setattr(preprocessing, "BATCH_BYTES", 1 << 19)
    preprocess(config([jsonl_file], tokenizer_model, tmp_path / "large", append_eod=True))
    assert both_files(tmp_path / "large") == both_files(tmp_path / "w1"), "batches leave no trace"
    tokenizer = SentencePieceTokenizer(tokenizer_model)
    texts = [json.loads(line)["text"] for line in open(jsonl_file, encoding="utf-8", newline="\n")]
    expected = [tokenizer.encode(text) + [tokenizer.eod] for text in texts if text]
    stock = IndexedDataset(str(tmp_path / "w1"))
    assert [stock[i].tolist() for i in range(len(stock))] == expected
    assert reports[0].empty == texts.count("") > 0 and reports[0].documents == len(expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(blacklist_categories=("Cs",)), max_size=40), min_size=1, max_size=12).filter(any), st.integers(1, 3), st.booleans())
def test_any_texts_round_trip(tokenizer_model, texts, workers, escape):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=escape) + "\n" for text in texts).encode())
        preprocess(config([path], tokenizer_model, Path(folder) / "out", append_eod=True, on_empty="keep", workers=workers))
        tokenizer = SentencePieceTokenizer(tokenizer_model)
        reader = IndexedReader(Path(folder) / "out", vocab_size=tokenizer.vocab_size)
        assert [reader.tokens(i).tolist() for i in range(len(reader))] == [tokenizer.encode(text) + [tokenizer.eod] for text in texts]


@pytest.mark.parametrize(
    ("on_empty", "append_eod", "documents"),
    [("skip", True, [[11, 2]]), ("keep", True, [[2], [2], [11, 2]]), ("skip", False, [[11]]), ("keep", False, [[], [], [11]])],
)
def test_empty_documents(shared, tmp_path, on_empty, append_eod, documents):
    case, model = shared / "cases" / "jsonl" / "empty_docs.jsonl", shared / "data" / "tokenizers" / "sp_test_en_1000.model"
    report = preprocess(config([case], model, tmp_path / "out", append_eod=append_eod, on_empty=on_empty))
    reader, stock = IndexedReader(tmp_path / "out"), IndexedDataset(str(tmp_path / "out"))
    assert [reader.tokens(i).tolist() for i in range(len(reader))] == documents == [stock[i].tolist() for i in range(len(stock))]
    assert report.empty == 2 and report.documents == len(documents)


def test_specials_in_a_text_do_not_become_ids(shared, tmp_path):
    case, model = shared / "cases" / "jsonl" / "specials_in_text.jsonl", shared / "data" / "tokenizers" / "sp_test_en_1000.model"
    report = preprocess(config([case], model, tmp_path / "out", append_eod=True))
    ids = IndexedReader(tmp_path / "out").tokens(0).tolist()
    assert ids[-1] == 2 and not {1, 2} & set(ids[:-1])
    assert report.unknown == ids.count(0) == 4 and report.unknown_share == 4 / len(ids)


def test_special_ids_of_another_model(shared, tmp_path):
    """bos is -1, end 1, unknown 2: what assumes 0/1/2 or lets -1 through fails here."""
    (tmp_path / "x.jsonl").write_text('{"text":"e e e"}\n')
    model = shared / "data" / "tokenizers" / "seqio_test.model"
    preprocess(config([tmp_path / "x.jsonl"], model, tmp_path / "out", append_eod=True))
    ids = IndexedReader(tmp_path / "out", vocab_size=26).tokens(0).tolist()
    assert ids == SentencePieceTokenizer(model).encode("e e e") + [1]


def test_bad_records_stop_or_are_skipped_and_counted(shared, tmp_path):
    case, model = shared / "cases" / "jsonl" / "bad_utf8.jsonl", shared / "data" / "tokenizers" / "mistral_v1_32k.model"
    with pytest.raises(CorpusError, match="bad_utf8.jsonl, line 2: not valid UTF-8 at byte 23 .*--on-bad-record skip"):
        preprocess(config([case], model, tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []
    report = preprocess(config([case], model, tmp_path / "out", on_bad_record="skip"))
    tokenizer, reader = SentencePieceTokenizer(model), IndexedReader(tmp_path / "out")
    assert [tokenizer.decode(reader.tokens(i)) for i in range(len(reader))] == ["ok", "ok2"]
    assert report.skipped == 1 and "line 2" in report.messages[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_is_named_whatever_the_workers(tmp_path, tokenizer_model, monkeypatch, workers):
    monkeypatch.setattr(preprocessing, "BATCH_BYTES", 100)
    lines = [b'{"text":"a"}'] * 200
    lines[150] = lines[90] = lines[120] = b"broken"
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(CorpusError, match="line 91:"):
        preprocess(config([tmp_path / "x.jsonl"], tokenizer_model, tmp_path / "out", workers=workers))
    report = preprocess(config([tmp_path / "x.jsonl"], tokenizer_model, tmp_path / "out", workers=workers, on_bad_record="skip"))
    assert report.skipped == 3 and report.documents == 197


def test_nothing_to_write_is_an_error(tmp_path, tokenizer_model):
    (tmp_path / "x.jsonl").write_text('{"text":""}\nbroken\n')
    with pytest.raises(CorpusError, match="1 documents are empty and 1 were skipped"):
        preprocess(config([tmp_path / "x.jsonl"], tokenizer_model, tmp_path / "out", on_bad_record="skip"))
    assert finished_files(tmp_path) == [] and not list(tmp_path.glob("*.partial"))


def test_append_eod_needs_an_end_in_the_model(tmp_path, tokenizer_model, monkeypatch):
    (tmp_path / "x.jsonl").write_text('{"text":"a"}\n')
    monkeypatch.setattr(SentencePieceTokenizer, "__init__", _without_eod(SentencePieceTokenizer.__init__))
    with pytest.raises(CorpusError, match="--append-eod needs"):
        preprocess(config([tmp_path / "x.jsonl"], tokenizer_model, tmp_path / "out", append_eod=True))


def _without_eod(real):
    def init(self, *args):
        real(self, *args)
        self.eod = None

    return init


def test_folder_of_sources(tmp_path, tokenizer_model):
    for name, text in {"b.py": "b = 1\n", "a/c.py": "\tc\r\n", "a/skip.py": "x"}.items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(text.encode())
    report = preprocess(
        config([tmp_path / "src"], tokenizer_model, tmp_path / "deep" / "er" / "out", selection=dict(glob="**/*.py", exclude=["a/skip*"]), workers=2)
    )
    reader, tokenizer = IndexedReader(tmp_path / "deep" / "er" / "out"), SentencePieceTokenizer(tokenizer_model)
    assert [tokenizer.decode(reader.tokens(i)) for i in range(2)] == ["\tc\r\n", "b = 1\n"] and report.text_bytes == 10


def test_worker_errors_and_order():
    def slow_double(number):
        time.sleep(0.01 * (number % 3))
        if number == 1000:
            raise ZeroDivisionError("division of one")
        return 2 * number

    for workers in (1, 3):
        with WorkerPool(lambda: slow_double, workers) as pool:
            assert list(pool.map(range(40))) == [2 * n for n in range(40)]
    with WorkerPool(lambda: slow_double, 2) as pool, pytest.raises(CorpusError, match=r"worker \d \(process \d+\) failed: (?s:.*)division of one"):
        list(pool.map([1, 1000, 2]))
    with pytest.raises(CorpusError, match="--workers 0"):
        WorkerPool(lambda: slow_double, 0)


def test_the_death_of_an_idle_worker_is_seen_while_another_works():
    with WorkerPool(lambda: time.sleep, 2) as pool:
        results = pool.map([0, 20])  # worker 1 takes the first, is done, and then is killed
        assert next(results) is None
        os.kill(pool._processes[1].pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(CorpusError, match=r"worker 1 \(process \d+\) was killed by SIGKILL"):
            next(results)
        assert time.monotonic() - start < 10


def test_tasks_are_drawn_only_as_needed():
    """Memory is bounded: one slow task does not let the others run ahead for ever."""
    drawn = 0

    def tasks():
        nonlocal drawn
        for number in range(200):
            drawn += 1
            yield number

    def first_is_slow(number):
        time.sleep(0.4 if number == 0 else 0)
        return number

    with WorkerPool(lambda: first_is_slow, 2) as pool:
        results = pool.map(tasks())
        assert next(results) == 0
        assert drawn <= 8 and list(results) == list(range(1, 200))


def test_large_tasks_and_results_do_not_block_each_other():
    with WorkerPool(lambda: lambda data: data + data, 2) as pool:
        assert [len(result) for result in pool.map(bytes(1 << 20) for _ in range(12))] == [2 << 20] * 12


@pytest.fixture
def long_job(tmp_path, tokenizer_model):
    """A job of about a minute, seen at work; the folder for its output."""
    line = json.dumps({"text": "def return if else " * 2000}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 1500)
    folder = tmp_path / "out"
    folder.mkdir()
    process = command(
        "preprocess", "--input", tmp_path / "x.jsonl", "--tokenizer-model", tokenizer_model, "--output-prefix", folder / "p", "--workers", "2"
    )
    deadline = time.monotonic() + 60
    while not ((folder / "p.bin.partial").exists() and (folder / "p.bin.partial").stat().st_size > 0):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)
    yield process, folder
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=30)


def children(pid: int) -> list[int]:
    return [int(found) for found in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody in this container reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_killed_worker_ends_the_run_at_once_and_is_named(long_job):
    process, folder = long_job
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert process.returncode == 2 and f"worker 1 (process {victim}) was killed by SIGKILL" in errors and "Traceback" not in errors
    assert list(folder.iterdir()) == []


def test_kill_9_leaves_nothing_finished_and_the_next_run_works(long_job, tokenizer_model):
    process, folder = long_job
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert finished_files(folder) == []
    with pytest.raises(CorpusError, match="unfinished or interrupted"):
        IndexedReader(folder / "p")
    deadline = time.monotonic() + 30
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    (folder.parent / "small.jsonl").write_text('{"text":"a"}\n')
    preprocess(config([folder.parent / "small.jsonl"], tokenizer_model, folder / "p"))
    assert sorted(path.name for path in folder.iterdir()) == ["p.bin", "p.idx"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_terminated_runs_clean_up(long_job, number, status):
    process, folder = long_job
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status and "Traceback" not in errors
    assert list(folder.iterdir()) == []


def run(*arguments) -> tuple[int, str, str]:
    process = command(*arguments)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def test_commands_from_text_to_inspection(tmp_path, jsonl_file):
    status, out, errors = run("tokenizer", "train", "--input", jsonl_file, "--vocab-size", 320, "--model-prefix", tmp_path / "t")
    assert status == 0 and "600 of 600 documents" in out, errors
    status, out, errors = run("tokenizer", "inspect", tmp_path / "t.model", "--text", "  if x:\n\treturn [b]y[/b]")
    assert status == 0 and "equal" in out and "NOT" not in out and "[/b]" in out, errors
    preprocess_arguments = ["--input", jsonl_file, "--tokenizer-model", tmp_path / "t.model", "--append-eod", "--output-prefix", tmp_path / "c"]
    status, out, errors = run("preprocess", *preprocess_arguments, "--workers", 2)
    assert status == 0 and "uint16" in out and "7 (left out)" in out and "tokenizing" in errors, errors
    status, out, errors = run("corpus", "inspect", tmp_path / "c", "--tokenizer-model", tmp_path / "t.model")
    assert status == 0 and "593 (0 empty)" in out and "every id is inside" in out and "unknown" in out, errors
    whole = np.fromfile(tmp_path / "c.bin", np.uint16)
    whole[700] = 320
    whole.tofile(tmp_path / "c.bin")
    status, _, errors = run("corpus", "inspect", tmp_path / "c", "--tokenizer-model", tmp_path / "t.model")
    assert status == 2 and "found id 320, expected an id in the vocabulary, 0 to 319" in errors


def test_many_unknown_ids_are_warned_of(shared, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text":"a\\nb\\nc"}\n')
    model = shared / "data" / "tokenizers" / "sp_test_en_1000.model"
    status, _, errors = run("preprocess", "--input", tmp_path / "x.jsonl", "--tokenizer-model", model, "--output-prefix", tmp_path / "o")
    assert status == 0 and "of the tokens are unknown to" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus", "inspect", "/nowhere/x"], "megatron_dyn corpus: /nowhere/x.idx: cannot be opened"),
        (["tokenizer", "inspect", "/nowhere/x.model"], "megatron_dyn tokenizer: /nowhere/x.model: no such tokenizer model"),
        (["nonsense"], "no command 'nonsense'"),
        ([], "usage:"),
    ],
)
def test_errors_are_one_clear_line_and_status_2(arguments, message):
    status, out, errors = run(*arguments)
    assert status == 2 and message in errors and "Traceback" not in errors and out == ""


def test_help_lists_every_command():
    status, out, _ = run("--help")
    assert status == 0 and all(name in out for name in ("preprocess", "tokenizer", "corpus"))
