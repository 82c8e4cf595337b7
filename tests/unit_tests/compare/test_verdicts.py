# SPDX-License-Identifier: Apache-2.0
"""Verdicts on runs written by hand: what each finds, what it lets pass, and when it does not judge."""

import json

import numpy as np
import pytest
from written_run import three_seeds, write_run

from megatron_dyn.compare import CompareError, arms_of, compare_runs, read_run
from megatron_dyn.compare.command import main

def verdicts_of(*folders):
    return {(verdict.name, verdict.arm): verdict for verdict in compare_runs(arms_of([read_run(folder) for folder in folders]))}


def judged(tmp_path, **changes):
    """Verdicts on a changed fp32 run of another grouping, by name."""
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", way="packed-fixed", **changes)
    return {name: verdict for (name, _), verdict in verdicts_of(tmp_path / "a", tmp_path / "b").items()}


def failing(found):
    return {name for name, verdict in found.items() if verdict.holds is False}


def test_equal_runs_hold_everything(tmp_path):
    found = judged(tmp_path)
    assert not failing(found) and found["real tokens a second"].value == pytest.approx(1)
    assert {verdict.arm for verdict in found.values()} == {"packed-fixed"}


@pytest.mark.parametrize(
    "changes, fails",
    [
        (dict(change=lambda loss: loss * (1 + 9e-6)), set()),
        (dict(change=lambda loss: loss * (1 + 2e-5)), {"first loss", "every loss", "final loss", "held-out loss"}),
        (dict(change=lambda loss: loss + 1e-3 * (np.arange(len(loss)) == 30)), {"every loss"}),
        (
            dict(change=lambda loss: np.where(np.arange(len(loss)) == 59, np.nan, loss), held_out=lambda loss: 2.5),
            {"finite", "every loss", "final loss", "held-out loss"},
        ),
        (dict(change=lambda loss: loss[::-1]), {"first loss", "every loss", "final loss", "held-out loss", "correlation"}),
        (dict(norm=1.001), {"first gradient"}),
        (dict(norm=1.1), {"first gradient", "gradient norm"}),
        (dict(held_out=lambda loss: loss + 0.01), {"held-out loss"}),
        (dict(digest="x"), {"documents"}),
        (dict(corpus="other"), {"documents"}),
        (dict(dropped=1), {"left out"}),
    ],
)
def test_each_check_finds_its_own(tmp_path, changes, fails):
    assert failing(judged(tmp_path, **changes)) == fails


def test_a_loss_that_is_not_finite_everywhere_is_no_success(tmp_path):
    found = judged(tmp_path, change=lambda loss: loss * np.nan, held_out=lambda loss: 2.5)
    assert {"first loss", "final loss"} <= failing(found)


def test_bf16_arms_are_judged_by_what_seeds_differ_by(tmp_path):
    reference = three_seeds(tmp_path, "a")
    rounding = np.random.default_rng(9)
    near = three_seeds(tmp_path, "near", way="packed-fixed", change=lambda loss: loss * (1 + 1e-3 * rounding.uniform(-1, 1, len(loss))))
    assert not failing({name: verdict for (name, _), verdict in verdicts_of(*reference, *near).items()})
    parted = three_seeds(tmp_path, "parted", way="fixed-count", change=lambda loss: loss + 0.3 * np.linspace(0, 1, len(loss)))
    found = verdicts_of(*reference, *near, *parted)
    assert {name for (name, arm), verdict in found.items() if verdict.holds is False} == {"every loss", "final loss", "held-out loss"}
    assert {arm for (_, arm), verdict in found.items() if verdict.holds is False} == {"fixed-count"}


def test_without_three_seeds_nothing_is_judged_by_noise(tmp_path):
    reference, other = three_seeds(tmp_path, "a"), three_seeds(tmp_path, "b", way="packed-fixed", change=lambda loss: loss + 1.0 * (np.arange(len(loss)) > 3))
    found = verdicts_of(*reference[:2], *other[:2])
    assert found["final loss", "packed-fixed"].holds is None and "needs 3 seeds" in found["final loss", "packed-fixed"].text
    assert found["first loss", "packed-fixed"].holds  # rounding alone is judged all the same


def test_seeds_are_paired_and_arms_without_a_common_seed_refused(tmp_path):
    write_run(tmp_path / "a", seed=1), write_run(tmp_path / "b", seed=2, way="packed-fixed")
    with pytest.raises(CompareError, match="without a common seed"):
        verdicts_of(tmp_path / "a", tmp_path / "b")


def test_a_resume_that_jumps_or_loses_steps_is_found(tmp_path):
    assert not failing(judged(tmp_path / "good", resumed=[30]))
    jump = judged(tmp_path / "jump", resumed=[30], change=lambda loss: loss + 2.0 * (np.arange(len(loss)) >= 30))
    assert "resume" in failing(jump)
    assert "steps" in failing(judged(tmp_path / "lost", resumed=[30], leave_out=(31, 32)))
    assert failing(judged(tmp_path / "gap", leave_out=(31,))) >= {"steps"}


def test_where_and_when_make_no_arm_and_everything_else_does(tmp_path):
    runs = [read_run(write_run(tmp_path / name, **changes)) for name, changes in {"a": {}, "b": dict(seed=2), "c": dict(tp=2)}.items()]
    arms = arms_of(runs)
    assert [(arm.name, list(arm.runs)) for arm in arms] == [("1", [1, 2]), ("2", [1])]
    assert [arm.name for arm in arms_of(runs, reference="c")] == ["2", "1"]
    with pytest.raises(CompareError, match="none of the runs"):
        arms_of(runs, reference="d")
    with pytest.raises(CompareError, match="nothing to compare"):
        arms_of(runs[:2])


def test_the_same_run_twice_is_refused_unless_the_arms_are_named(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with pytest.raises(CompareError, match="same settings and the same seed 1"):
        main([str(a), str(b)])
    assert main([f"old={a}", f"new={b}"]) == 0
    assert "new trains as old does" in capsys.readouterr().out


def test_speed_is_the_median_of_steady_steps(tmp_path):
    write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed", speed=2.0)
    found = {verdict.name: verdict for verdict in compare_runs(arms_of([read_run(tmp_path / name) for name in "ab"]), peak_tflops=1.0)}
    assert found["real tokens a second"].value == pytest.approx(2) and "(400 to 200)" in found["real tokens a second"].text
    assert f"MFU {(100e9 + 5000e6) / 0.25 / 1e12:.1%} to {(100e9 + 5000e6) / 0.5 / 1e12:.1%}" in found["operations a second"].text


@pytest.mark.parametrize("damage, message", [("run.json", "no readable run.json"), ("metrics.jsonl", "no such file"), ("empty", "no step was recorded")])
def test_what_is_no_run_is_refused(tmp_path, damage, message):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text("") if damage == "empty" else (folder / damage).unlink()
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_another_model_is_refused_and_another_learning_rate_named(tmp_path, capsys):
    a, other = write_run(tmp_path / "a"), write_run(tmp_path / "deeper", layers=3)
    with pytest.raises(CompareError, match=r"other models \(num_layers\)"):
        main([str(a), str(other)])
    faster = write_run(tmp_path / "faster", way="packed-fixed", lr=2.0, change=lambda loss: loss * 1.1)
    assert main([str(a), str(faster), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "They also differ in optimizer.lr, which changes what is learnt." in found["headline"][0]
    assert found["differing_settings"]["optimizer.lr"] == ["1.0", "2.0"]
    assert main([str(a), str(faster)]) == 1 and "optimizer.lr" in capsys.readouterr().out


def test_ranks_are_told_beside_the_speed_and_operations_are_a_ranks(tmp_path, capsys):
    a, two = write_run(tmp_path / "a"), write_run(tmp_path / "two", tp=2, ranks=2, speed=1.5)
    assert main([f"one={a}", f"two={two}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "two is 1.50 times as fast as one, on 2 ranks against 1." in found["headline"][0]
    [operations] = [verdict for verdict in found["verdicts"] if verdict["name"] == "operations a second"]
    assert operations["value"] == pytest.approx(0.75)


@pytest.mark.parametrize("words, message", [(["--peak-tflops", "-1"], "--peak-tflops is -1"), (["--output", "file"], "is a file")])
def test_wrong_arguments_are_refused_before_anything_is_read(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CompareError, match=message):
        main(["nothing", "here", *words])


def test_a_fault_in_one_seed_does_not_hide_behind_the_spread_it_makes(tmp_path):
    reference = three_seeds(tmp_path, "a")
    good = three_seeds(tmp_path, "b", way="packed-fixed")
    bad = write_run(tmp_path / "bad", seed=3, bf16=True, way="packed-fixed", change=lambda loss: loss + 2.0 * (np.arange(len(loss)) > 3))
    assert {"every loss", "final loss"} <= {name for (name, _), verdict in verdicts_of(*reference, *good[:2], bad).items() if verdict.holds is False}
