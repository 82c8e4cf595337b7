# SPDX-License-Identifier: Apache-2.0
"""Checkpoints when things go wrong: kill -9, full disks, damaged files, the wrong model. Real processes, real files."""

import dataclasses
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoint_job import VOCAB, Shape, assert_same, damage, everything, globals_of, load, save, start
from launch import launch, outcomes

from megatron_dyn.training import checkpoint
from megatron_dyn.training.checkpoint import CheckpointError, CheckpointManager
from megatron_dyn.training.checkpoint_disk import digest_files
from megatron_dyn.training.checkpoint_files import FORMAT_NAME, FORMAT_VERSION, SEAL_NAME, TRACKER_NAME, CheckpointFolder


def refusal(act) -> str:
    """The message of the CheckpointError that `act` must raise."""
    with pytest.raises(CheckpointError) as caught:
        act()
    return str(caught.value)


def attempt(act) -> "tuple[str, float]":
    begin = time.monotonic()
    return refusal(act), time.monotonic() - begin


# ---- kill -9 ---------------------------------------------------------------------------------------------------


def doomed(rank, world, folder, saves):
    """Resumes, then trains and saves without end, until the kill: `saves[rank]` times the duration of a save later."""
    run = start(Shape(tp=world))
    load(run, folder)
    run.train(1)
    begin = time.monotonic()
    save(run, folder, keep_last=2)
    delay = saves[rank] * (time.monotonic() - begin)
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        run.train(1)
        save(run, folder, keep_last=2)


def states_of_an_unbroken_run(rank, world, steps):
    run, states = start(Shape()), []
    for _ in range(steps):
        run.train(1)
        states.append(globals_of(run))
    return states


def what_is_on_disk(rank, world, folder):
    run = start(Shape())
    state = load(run, folder)
    return (0, None) if state is None else (state.iteration, globals_of(run))


def test_kill_9_at_random_moments_always_leaves_a_whole_checkpoint(tmp_path):
    chance, found = random.Random(7), [(0, None)]
    for _ in range(6):
        saves = [chance.uniform(0.0, 2.0) for _ in range(2)]
        ended = outcomes(2, doomed, tmp_path, saves, timeout=60, grace=1.0)
        assert any("exit code -9" in (o.error or "") for o in ended), ended
        found.append(launch(1, what_is_on_disk, tmp_path)[0])
        assert found[-1][0] > found[-2][0]  # each run completed one more before the kill: that one, at least, is there
    expected = launch(1, states_of_an_unbroken_run, found[-1][0])[0]
    for iteration, state in found[1:]:
        assert_same(expected[iteration - 1], state)


def killed_at_byte(rank, world, folder, limit):
    """The operating system kills the save at this byte of the first file that gets so long."""
    run = start(Shape())
    load(run, folder)
    run.train(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    save(run, folder)
    os.kill(os.getpid(), signal.SIGKILL)  # it was longer than every file


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_byte_of_a_save_the_one_before_loads(tmp_path, kills):
    def make(rank, world):
        run = start(Shape())
        run.train(1)
        save(run, tmp_path)

    launch(1, make)
    sizes = [path.stat().st_size for path in (tmp_path / "iter_0000001").iterdir()]
    chance, expected, largest = random.Random(kills), launch(1, states_of_an_unbroken_run, 2)[0], max(sizes)
    limits = [0, *(int(largest ** chance.random()) for _ in range(kills - 1))]
    for limit in limits:
        ended = outcomes(1, killed_at_byte, tmp_path, limit, timeout=60)[0]
        assert f"exit code -{signal.SIGXFSZ.value}" in ended.error, f"byte {limit} of files of {sorted(sizes)}: {ended}"
        iteration, state = launch(1, what_is_on_disk, tmp_path)[0]
        assert iteration == 1, limit
        assert_same(expected[0], state)


# ---- a rank that cannot write ----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim, limit, what", [(1, 4096, "tensors"), (0, 100, "common.pt")])
def test_a_rank_that_cannot_write_stops_every_rank_within_seconds(tmp_path, victim, limit, what):
    def job(rank, world):
        run = start(Shape(tp=2))
        run.train(1)
        save(run, tmp_path)
        run.train(1)
        if rank == victim:  # a real error of the operating system: writing beyond `limit` bytes fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        message, seconds = attempt(lambda: save(run, tmp_path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        torch.distributed.barrier()
        left = sorted(os.listdir(tmp_path))
        torch.distributed.barrier()
        latest = CheckpointManager(save=None, load=tmp_path, keep_last=None).latest()
        again = save(run, tmp_path)  # the run could go on
        return message, seconds, left, latest, again

    for message, seconds, left, latest, again in launch(2, job):
        assert what in message and f"rank {victim}" in message and "File too large" in message
        assert seconds < 10
        assert left == ["iter_0000001", TRACKER_NAME] and latest == 1
        assert again == str(tmp_path / "iter_0000002")


def test_a_folder_that_cannot_be_made_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def job(rank, world):
        run = start(Shape(tp=2))
        return refusal(lambda: save(run, tmp_path / "file" / "checkpoints"))

    assert all(re.search("begin a checkpoint in .*rank 0: NotADirectoryError", m) for m in launch(2, job))


def test_a_rank_that_dies_while_saving_ends_the_others_and_leaves_the_checkpoint_before(tmp_path):
    def job(rank, world):
        run = start(Shape(tp=2))
        run.train(1)
        save(run, tmp_path)
        if rank == 1:
            checkpoint.write_state = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        run.train(1)
        save(run, tmp_path)

    ended = outcomes(2, job, timeout=30, grace=10)
    assert "exit code -9" in ended[1].error and not ended[0].ok and not ended[0].hung and ended[0].seconds < 15
    assert launch(1, what_is_on_disk, tmp_path)[0][0] == 1


def test_ranks_that_would_save_different_things_are_refused(tmp_path):
    def job(rank, world):
        run = start(Shape(tp=2))
        manager = CheckpointManager(save=tmp_path, load=None, keep_last=None)
        parts = {"models": run.models, "optimizer": run.optimizer, "scheduler": run.scheduler}
        yield_messages = [
            refusal(lambda: manager.save(1, **parts, sampler_state={"step": rank}, extra={})),
            refusal(lambda: manager.save(1 + rank, **parts, sampler_state={}, extra={})),
            refusal(lambda: manager.save(1, **parts, sampler_state={}, extra={"tensor": torch.ones(1)})),
        ]
        return yield_messages

    for sampler, iteration, extra in launch(2, job):
        assert "sampler_state differs between rank 0 and ranks [1]" in sampler
        assert "iteration differs" in iteration and "must be JSON-able" in extra
    assert os.listdir(tmp_path) == []


# ---- damaged and foreign checkpoints -----------------------------------------------------------------------------


def test_any_damaged_file_is_refused_on_every_rank_and_the_older_checkpoint_named(tmp_path):
    def make(rank, world):
        run = start(Shape(tp=2, distributed=True))
        for _ in range(2):
            run.train(1)
            save(run, tmp_path)

    launch(2, make)
    folder = tmp_path / "iter_0000002"
    names = sorted(os.listdir(folder))
    assert len(names) >= 5 and {".metadata", "common.pt", "metadata.json", SEAL_NAME} < set(names)

    def refused(rank, world):
        run = start(Shape(tp=2, distributed=True))
        run.train(4)
        untouched, messages = globals_of(run), {}
        for name in names:
            for how in ("cut", "flip", "delete"):
                content = (folder / name).read_bytes()
                torch.distributed.barrier()
                if rank == 0:
                    damage(folder / name, how)
                torch.distributed.barrier()
                messages[name, how] = "" if how == "delete" and name == SEAL_NAME else refusal(lambda: load(run, tmp_path))
                torch.distributed.barrier()
                if rank == 0:
                    (folder / name).write_bytes(content)
        assert_same(untouched, globals_of(run))
        return messages, load(run, tmp_path).iteration

    first, second = launch(2, refused, timeout=120)
    assert first == second and first[1] == 2
    for (name, how), message in first[0].items():
        if message:
            assert f"iter_0000002/{name}" in message and "Iteration 1 is usable" in message, (name, how, message)


def test_another_model_is_refused_naming_the_tensors_before_anything_changes(tmp_path):
    def make(rank, world):
        run = start(Shape())
        run.train(1)
        save(run, tmp_path)

    launch(1, make)
    shapes = {
        "hidden": Shape(hidden=32), "layers": Shape(layers=2), "tied": Shape(tied=True), "precision": Shape(bf16=True),
        "vocabulary": Shape(padded_vocab=64),
    }  # fmt: skip

    def refused(rank, world, name):
        run = start(shapes[name])
        before = globals_of(run) if name != "precision" else None
        message = refusal(lambda: load(run, tmp_path, vocab_size=None))
        if before is not None:
            run.scheduler.step(increment=0)
            after = globals_of(run)
            assert_same(before, {key: after[key] for key in before})
        return message

    answers = {name: launch(1, refused, name)[0] for name in shapes}
    qkv = "decoder.layers.self_attention.linear_qkv.weight"
    assert f"{qkv}: [4, 32, 16] float32 in the checkpoint, [4, 64, 32] float32 here" in answers["hidden"]
    assert f"{qkv}: [4, 32, 16] float32 in the checkpoint, [2, 32, 16] float32 here" in answers["layers"]
    assert "output_layer.weight [56, 16] float32 is in the checkpoint only" in answers["tied"]
    assert f"{qkv}: [4, 32, 16] float32 in the checkpoint, [4, 32, 16] bfloat16 here" in answers["precision"]
    assert "embedding.word_embeddings.weight: [56, 16] float32 in the checkpoint, [64, 16]" in answers["vocabulary"]
    assert not re.search(r"(linear_fc1|linear_qkv|layernorm).*in the checkpoint only", answers["tied"])


def test_a_checkpoint_that_lacks_vocabulary_rows_is_refused(tmp_path):
    def make(rank, world):
        save(start(Shape()), tmp_path)

    def grown(rank, world, vocab_size):
        run = start(Shape(padded_vocab=64))
        if vocab_size == VOCAB:
            return load(run, tmp_path, vocab_size=vocab_size).iteration
        return refusal(lambda: load(run, tmp_path, vocab_size=vocab_size))

    launch(1, make)
    assert launch(1, grown, VOCAB) == [0]  # before the first step, too
    assert "embedding.word_embeddings.weight: [56, 16]" in launch(1, grown, 60)[0]


def test_model_only_checkpoints_and_empty_folders(tmp_path):
    def job(rank, world):
        run = start(Shape())
        assert CheckpointManager(save=None, load=None, keep_last=None).latest() is None
        assert load(run, tmp_path / "nothing") is None
        manager = CheckpointManager(save=tmp_path, load=tmp_path, keep_last=None)
        manager.save(5, models=run.models, optimizer=None, scheduler=None, sampler_state={"a": [1]}, extra={"b": None})
        without = refusal(lambda: manager.load(models=run.models, optimizer=run.optimizer, scheduler=None))
        state = manager.load(models=run.models, optimizer=None, scheduler=None)
        nowhere = refusal(lambda: save(run, None))
        return without, state, nowhere

    without, state, nowhere = launch(1, job)[0]
    assert "saved without an optimizer" in without and "--save" in nowhere
    assert (state.iteration, state.sampler_state, state.extra, state.rng_restored) == (5, {"a": [1]}, {"b": None}, True)


def test_loss_scaling_is_refused_instead_of_losing_the_scale(tmp_path):
    message = launch(1, lambda rank, world: refusal(lambda: save(start(Shape(bf16=True, loss_scale=128.0)), tmp_path)))[0]
    assert "loss scaling (fp16)" in message and os.listdir(tmp_path) == []


def test_the_sampler_gets_its_state_and_may_refuse(tmp_path):
    class Sampler:
        def __init__(self, refuses):
            self.refuses, self.state = refuses, None

        def load_state_dict(self, state):
            if self.refuses:
                raise ValueError("another corpus")
            self.state = state

    def job(rank, world):
        run = start(Shape(tp=2))
        save(run, tmp_path, iteration=3)
        manager = CheckpointManager(save=None, load=tmp_path, keep_last=None)
        parts = {"models": run.models, "optimizer": run.optimizer, "scheduler": run.scheduler}
        willing = Sampler(False)
        manager.load(**parts, sampler=willing)
        return willing.state, refusal(lambda: manager.load(**parts, sampler=Sampler(rank == 1)))

    for state, message in launch(2, job):
        assert state == {"step": 0}
        assert "could not restore the sampler: rank 1: ValueError: another corpus" in message


def test_this_runs_settings_win_over_the_checkpoints_when_the_scheduler_says_so(tmp_path):
    def job(rank, world):
        run = start(Shape())
        run.train(2)
        save(run, tmp_path)
        for group in run.optimizer.param_groups:
            group["max_lr"] = 0.5
        load(run, tmp_path)
        ours = [group["max_lr"] for group in run.optimizer.param_groups]
        run.scheduler.override_opt_param_scheduler, run.scheduler.use_checkpoint_opt_param_scheduler = False, True
        load(run, tmp_path)
        return ours, [group["max_lr"] for group in run.optimizer.param_groups], run.scheduler.num_steps

    ours, theirs, steps = launch(1, job)[0]
    assert set(ours) == {0.5} and set(theirs) == {1e-2} and steps == 2


def test_old_checkpoints_go_after_the_new_one_and_a_failing_deletion_is_only_a_warning(tmp_path, caplog):
    def job(rank, world):
        run, kept, records = start(Shape()), [], []
        for iteration in range(1, 5):
            save(run, tmp_path, iteration=iteration, keep_last=2)
            kept.append(sorted(p.name for p in Path(tmp_path).glob("iter_*")))
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("megatron_dyn").addHandler(handler)
        checkpoint.CheckpointFolder.prune = lambda *args: (_ for _ in ()).throw(PermissionError("not yours"))
        save(run, tmp_path, iteration=5, keep_last=2)
        return kept, records

    kept, records = launch(1, job)[0]
    assert [[int(name[5:]) for name in names] for names in kept] == [[1], [1, 2], [2, 3], [3, 4]]
    assert any("could not remove old checkpoints" in text and "not yours" in text for text in records)
    assert (tmp_path / TRACKER_NAME).read_text() == "5"


def test_states_differ_between_steps():
    """The comparisons above would mean nothing if training changed nothing."""
    one, two = launch(1, states_of_an_unbroken_run, 2)[0]
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(one, everything([two]))


# ---- foreign files -----------------------------------------------------------------------------------------------


class Malicious:
    """A pickle that runs a program when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def sealed_again(folder: Path) -> None:
    """As an attacker would: who can write the files can write the seal."""
    iteration = int(folder.name[5:])
    description = CheckpointFolder(folder.parent).read_seal(iteration)
    names = [path.name for path in folder.iterdir() if path.name != SEAL_NAME]
    (folder / SEAL_NAME).unlink()
    description = {key: value for key, value in description.items() if key not in ("format", "format_version", "files")}
    CheckpointFolder(folder.parent).seal(folder, description, digest_files(folder, names))


def poison(folder: Path, where: str, mark: Path) -> None:
    if where == "common.pt":
        torch.save({"optimizer_groups": Malicious(mark)}, folder / where)
    elif where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Malicious(mark)))
    else:  # the generators' objects, or the tensors, in a tensor file
        metadata, name = pickle.loads((folder / ".metadata").read_bytes()), POISONED[where]
        content = io.BytesIO()
        torch.save([Malicious(mark)], content)
        (folder / name).write_bytes(content.getvalue())
        for index, info in metadata.storage_data.items():
            if index.fqn.startswith("rng_state") == (where == "an object"):
                metadata.storage_data[index] = dataclasses.replace(info, relative_path=name, offset=0, length=len(content.getvalue()))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed_again(folder)


POISONED = {"common.pt": "common.pt", ".metadata": ".metadata", "an object": "__9_0.distcp", "a tensor": "__9_0.distcp"}


@pytest.mark.parametrize("where", POISONED)
def test_no_code_of_a_foreign_checkpoint_runs(tmp_path, where):
    def make(rank, world):
        run = start(Shape(tp=2))
        save(run, tmp_path / "ck", iteration=1)
        save(run, tmp_path / "ck", iteration=2)

    launch(2, make)
    mark = tmp_path / "it ran"
    poison(tmp_path / "ck" / "iter_0000002", where, mark)
    messages = launch(2, lambda rank, world: refusal(lambda: load(start(Shape(tp=2)), tmp_path / "ck")))
    assert not mark.exists()
    message = messages[0]
    assert messages[1] == message
    assert message.count(f"iter_0000002/{POISONED[where]} is not used: it names posix.mkdir") == 1, message
    assert message.count("posix.mkdir") == 1 and "weights_only" not in message and "Iteration 1 is usable" in message, message


def test_mutant_without_forcing_weights_only_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(CheckpointManager, "load", CheckpointManager.load.__wrapped__)
    with pytest.raises(AssertionError):
        test_no_code_of_a_foreign_checkpoint_runs(tmp_path, "an object")
    assert (tmp_path / "it ran").exists()


def test_links_are_not_followed_out_of_the_folder(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "ck"
    outside.mkdir(), folder.mkdir()
    (outside / "precious").write_text("kept")
    (folder / f"{TRACKER_NAME}.tmp").symlink_to(outside / "precious")
    (folder / "iter_0000009.tmp-00000000").symlink_to(outside)

    def job(rank, world):
        run = start(Shape())
        save(run, folder, iteration=1, keep_last=1)
        os.rename(folder / "iter_0000001", outside / "moved")
        (folder / "iter_0000001").symlink_to(outside / "moved")
        save(run, folder, iteration=2, keep_last=1)

    launch(1, job)
    assert (outside / "precious").read_text() == "kept" and (outside / "moved" / SEAL_NAME).is_file()
    assert sorted(os.listdir(folder)) == ["iter_0000002", TRACKER_NAME]


@pytest.mark.parametrize("name", ["../outside", pytest.param("/etc/hostname", marks=pytest.mark.slow)])
def test_a_seal_that_names_a_file_elsewhere_is_refused(tmp_path, name):
    launch(1, lambda rank, world: save(start(Shape()), tmp_path / "ck", iteration=1))
    path = tmp_path / "ck" / "iter_0000001" / SEAL_NAME
    folder = CheckpointFolder(tmp_path / "ck")
    description = {k: v for k, v in folder.read_seal(1).items() if k not in ("format", "format_version")}
    files = description.pop("files") | {name: {"bytes": 1, "sha256": "0"}}
    path.unlink()
    body = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **description, "files": files}
    path.write_text(json.dumps({**body, "seal_sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}))
    assert "lies outside the checkpoint" in launch(1, lambda rank, world: refusal(lambda: load(start(Shape()), tmp_path / "ck")))[0]
