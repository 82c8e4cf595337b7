# SPDX-License-Identifier: Apache-2.0
"""Holds, fails, or not decided: what a reader is told when the runs cannot answer."""

import json

import numpy as np
import pytest
from written_run import STEPS, three_seeds, write_run

from megatron_dyn.compare.command import main


pytestmark = pytest.mark.usefixtures("unrendered")


def compared(capsys, *words):
    """Exit status, and the JSON, which must be JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    status = main([*map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out, parse_constant=refuse)


def outcome(found, name):
    [verdict] = [verdict for verdict in found["verdicts"] if verdict["name"] == name]
    return verdict["outcome"]


def test_too_few_seeds_are_not_decided_and_no_success(tmp_path, capsys):
    for arm, changes in {"a": {}, "b": dict(way="packed-fixed", change=lambda loss: loss + 0.2 * (np.arange(len(loss)) > 3))}.items():
        write_run(tmp_path / arm, bf16=True, **changes)
    status, found = compared(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 3 and found["holds"] is None and found["outcomes"] == {"packed-fixed": None}
    assert "packed-fixed: not decided: 3 checks need 3 seeds of the reference (" in found["headline"][0] and "others hold" in found["headline"][0]
    assert outcome(found, "final loss") == "not decided" and outcome(found, "rows a second") == "reported"
    write_run(tmp_path / "worse", way="fixed-count", bf16=True, digest="x")
    assert compared(capsys, tmp_path / "a", tmp_path / "b", tmp_path / "worse")[0] == 1, "a failure counts for more than what is not decided"


@pytest.mark.parametrize("steps, needs", [(STEPS, "1 check needs 3 seeds of the reference"), (10, "1 check needs a held-out loss of both runs")])
def test_other_data_whose_held_out_loss_cannot_be_judged_is_not_decided(tmp_path, capsys, steps, needs):
    a, b = write_run(tmp_path / "a", steps=steps), write_run(tmp_path / "b", way="concat-chunk", steps=steps)
    status, found = compared(capsys, a, b)
    assert status == 3 and f"concat-chunk: not decided: {needs}" in found["headline"][0]


@pytest.mark.parametrize("lengths", [(STEPS, 50), (50, 50), (50, STEPS)])
def test_runs_that_are_not_finished_are_no_success(tmp_path, capsys, lengths):
    a, b = (write_run(tmp_path / way, way=way, steps=steps, train_iters=STEPS) for way, steps in zip(("dynamic", "packed-fixed"), lengths))
    status, found = compared(capsys, a, b)
    assert status == 3 and found["holds"] is None
    assert "packed-fixed: not decided: holds on the first 50 of 60 steps (10 of 10 checks)" in found["headline"][0]
    unfinished = [verdict for verdict in found["verdicts"] if verdict["name"] == "unfinished"]
    assert len(unfinished) == lengths.count(50) and "50 of 60 steps are recorded" in unfinished[0]["text"]
    assert found["arms"][0]["final_loss"] == found["arms"][1]["final_loss"], "of the steps that both have"


def test_fewer_steps_than_the_reference_and_a_failure_on_them_are_told(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed", steps=50)
    assert "holds on the first 50 of 60 steps" in compared(capsys, a, b)[1]["headline"][0]
    c = write_run(tmp_path / "c", way="packed-fixed", steps=50, norm=2.0)
    status, found = compared(capsys, a, c)
    assert status == 1 and "does not train as dynamic does on the first 50 of 60 steps: first gradient" in found["headline"][0]


def test_one_cut_seed_does_not_cut_the_others(tmp_path, capsys):
    reference = three_seeds(tmp_path, "a")
    parted = dict(bf16=True, way="packed-fixed", change=lambda loss: loss + 0.5 * (np.arange(len(loss)) > 3))
    others = [write_run(tmp_path / f"b{seed}", seed=seed, steps=2 if seed == 3 else STEPS, **parted) for seed in (1, 2, 3)]
    status, found = compared(capsys, *reference, *others)
    assert status == 1 and "every loss, final loss, held-out loss failed" in found["headline"][0], "on two steps alone nothing would be seen"
    text = next(verdict["text"] for verdict in found["verdicts"] if verdict["name"] == "final loss")
    assert "without seed 3, cut short" in text
    sound = [write_run(tmp_path / f"c{seed}", seed=seed, steps=2 if seed == 3 else STEPS, bf16=True, way="fixed-count") for seed in (1, 2, 3)]
    status, found = compared(capsys, *reference, *sound)
    assert status == 3 and "fixed-count: not decided: seed 3 has 2 of 60 steps (10 of 10 others hold)" in found["headline"][0]
    assert found["arms"][1]["final_loss"]["3"] is None and found["arms"][0]["final_loss"]["1"] == pytest.approx(found["arms"][1]["final_loss"]["1"])


def nan_at(*steps):
    return lambda loss: np.where(np.isin(np.arange(len(loss)), steps or np.arange(len(loss))), np.nan, loss)


def test_losses_that_are_no_numbers_at_the_same_steps_are_told_and_not_decided(tmp_path, capsys):
    a, b = (write_run(tmp_path / way, way=way, change=nan_at(30, 31)) for way in ("dynamic", "packed-fixed"))
    status, found = compared(capsys, a, b)
    assert status == 3 and "1 check needs a finite loss at every step" in found["headline"][0]
    assert next(verdict for verdict in found["verdicts"] if verdict["name"] == "finite")["value"] == 2
    c = write_run(tmp_path / "c", way="fixed-count", change=nan_at(30))
    status, found = compared(capsys, a, c)
    assert status == 1 and outcome(found, "finite") == "FAILS"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bf16", [False, True])
def test_runs_without_any_number_fail(tmp_path, capsys, bf16):
    all_nan = dict(bf16=bf16, change=nan_at())
    folders = [write_run(tmp_path / f"{way}{seed}", seed=seed, way=way, **all_nan) for way in ("dynamic", "packed-fixed") for seed in (1, 2, 3)]
    status, found = compared(capsys, *folders[:: 1 if bf16 else 3], "--output", tmp_path / "report")
    failed = {verdict["name"] for verdict in found["verdicts"] if verdict["holds"] is False}
    assert status == 1 and {"first loss", "every loss", "held-out loss"} <= failed


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_a_held_out_loss_that_is_no_number_fails(tmp_path, capsys, bf16, both):
    broken = dict(held_out=lambda loss: np.nan)
    a, b = write_run(tmp_path / "a", bf16=bf16, **(broken if both else {})), write_run(tmp_path / "b", way="packed-fixed", bf16=bf16, **broken)
    status, found = compared(capsys, a, b)
    assert status == 1 and outcome(found, "held-out loss") == "FAILS"


def test_a_step_without_loss_tokens_is_not_a_lost_loss(tmp_path, capsys):
    folders = [write_run(tmp_path / way, way=way, change=nan_at(30)) for way in ("dynamic", "packed-fixed")]
    for folder in folders:
        lines = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(lines.replace('"lm loss": null', '"lm loss": null, "num-loss-tokens": 0'))
    assert compared(capsys, *folders)[0] == 0


def test_a_fault_of_the_reference_itself_is_in_the_headline(tmp_path, capsys):
    a, b = write_run(tmp_path / "a", leave_out=(31,)), write_run(tmp_path / "b", way="packed-fixed", leave_out=(31,))
    status, found = compared(capsys, a, b)
    assert status == 1 and any("dynamic, the reference, is not sound: steps failed" in text for text in found["headline"])


def test_exact_arms_are_judged_by_the_worst_seed(tmp_path, capsys):
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)]
    for seed, by in ((1, 1e-3), (2, -2e-3)):
        folders.append(write_run(tmp_path / f"b{seed}", seed=seed, way="packed-fixed", held_out=lambda loss, by=by: loss + by))
    status, found = compared(capsys, *folders)
    [held_out] = [verdict for verdict in found["verdicts"] if verdict["name"] == "held-out loss"]
    assert status == 1 and held_out["value"] == pytest.approx(-2e-3, rel=1e-6), "the mean of the two would be a quarter of it"


def test_the_faster_arm_is_named_first_with_the_spread_over_seeds(tmp_path, capsys):
    reference = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (1, 2, 3)]
    slow = [write_run(tmp_path / f"b{seed}", seed=seed, way="pad-to-max", speed=1 / by) for seed, by in ((1, 1.5), (2, 1.56), (3, 1.6))]
    assert "dynamic is 1.56 times as fast as pad-to-max (1.50 to 1.60 over 3 seeds)." in compared(capsys, *reference, *slow)[1]["headline"][0]
    same = [write_run(tmp_path / f"c{seed}", seed=seed, way="packed-fixed") for seed in (1, 2, 3)]
    assert "packed-fixed and dynamic are equally fast" in compared(capsys, *reference, *same)[1]["headline"][0]


def test_no_speed_withholds_every_speed_and_a_note_is_shown(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed", speed=2.0)
    (tmp_path / "report").mkdir(), (tmp_path / "report" / "speed.png").touch()
    words = [a, b, "--no-speed", "--note", "They shared <one> card.", "--output", tmp_path / "report"]
    status, found = compared(capsys, *words)
    assert status == 0 and found["note"] == "They shared <one> card." and "fast" not in found["headline"][0]
    assert not [verdict for verdict in found["verdicts"] if "second" in verdict["name"] or "time" in verdict["name"]]
    assert "tokens_per_second" not in found["arms"][0] and not (tmp_path / "report" / "speed.png").exists()
    page = (tmp_path / "report" / "compare.html").read_text()
    assert "They shared &lt;one&gt; card." in page and "tokens/s" not in page and "Throughput" not in page and "wall time" not in page
    assert main([*map(str, words)]) == 0
    shown = capsys.readouterr().out
    assert "They shared <one> card." in shown and "tokens/s" not in shown


def test_a_cut_seed_takes_no_check_from_exact_seeds_that_are_not(tmp_path, capsys):
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)]
    parted = dict(way="packed-fixed", held_out=lambda loss: loss + 0.1)
    folders += [write_run(tmp_path / f"b{seed}", seed=seed, steps=steps, **parted) for seed, steps in ((1, STEPS), (2, 5))]
    status, found = compared(capsys, *folders)
    assert status == 1 and outcome(found, "held-out loss") == "FAILS"


def test_seeds_without_a_counterpart_are_told(tmp_path, capsys):
    folders = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in (1, 2)]
    folders += [write_run(tmp_path / f"b{seed}", seed=seed, way="packed-fixed") for seed in (2, 4, 5)]
    status, found = compared(capsys, *folders)
    [unpaired] = [verdict for verdict in found["verdicts"] if verdict["name"] == "unpaired"]
    assert status == 0 and unpaired["value"] == "4, 5" and unpaired["outcome"] == "reported"


def test_speeds_are_of_the_steps_that_both_have(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed", steps=20)
    lines = (a / "metrics.jsonl").read_text().splitlines()
    slower = [line.replace('"step-time": 0.5', '"step-time": 5.0') if json.loads(line)["iteration"] > 20 else line for line in lines]
    (a / "metrics.jsonl").write_text("\n".join(slower) + "\n")
    assert "equally fast" in compared(capsys, a, b)[1]["headline"][0]
