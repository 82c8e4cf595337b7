# SPDX-License-Identifier: Apache-2.0
"""Golden files and their comparison, without training: what must fail fails, and nothing is overwritten unseen."""

import dataclasses
import json
import math
import shutil

import golden_run
import pytest
import yaml
from golden_cases import TEST_CASES, CaseError, load_case, load_cases, words
from golden_run import Found
from golden_values import TOLERANCES, GoldenError, Series, as_series, compare, read_golden, rounded, write_golden

from megatron_dyn.training.arguments import parse_arguments

CASES = load_cases()
ON_CPU = {name: case for name, case in CASES.items() if case.platform == "cpu"}
BASE = "llama/tp1_pp1"


@pytest.fixture
def golden() -> dict[str, Series]:
    return read_golden(CASES[BASE].golden_path)


def altered(series: dict[str, Series], metric: str, values) -> dict[str, Series]:
    """The same, but for one metric's values: a dictionary of changes, or a function of all."""
    old = dict(series[metric].values)
    return series | {metric: dataclasses.replace(series[metric], values=values(old) if callable(values) else old | values)}


def problems(expected: dict[str, Series], actual: dict[str, Series], *, exact: bool) -> list[str]:
    return compare(expected, actual, CASES[BASE].tolerances, exact=exact)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
def test_golden_values_agree_with_themselves_and_mutants_fail(golden, exact):
    assert problems(golden, golden, exact=exact) == []
    for metric, series in golden.items():
        for step, value in series.values.items():
            for factor in (0.94, 1.061):
                if value != 0:
                    [problem] = problems(altered(golden, metric, {step: value * factor}), golden, exact=exact)
                    assert problem.startswith(f"{metric}: 1 of ") and f"at step {step}" in problem
        lacking = {name: one for name, one in golden.items() if name != metric}
        assert problems(golden, lacking, exact=exact) == [f"{metric}: missing in the run"]
        assert problems(lacking, golden, exact=exact) == [f"{metric}: missing in the golden values"]
        last = max(series.values)
        shorter = altered(golden, metric, lambda values, last=last: {step: value for step, value in values.items() if step != last})
        assert problems(golden, shorter, exact=exact) == [f"{metric}: the run lacks steps [{last}]"]
        assert problems(shorter, golden, exact=exact) == [f"{metric}: the golden values lack steps [{last}]"]
        for broken in (math.nan, math.inf, None, "nan"):
            spoilt = altered(golden, metric, {last: broken})
            assert problems(golden, spoilt, exact=exact) == [f"{metric}: no finite number in the run at steps [{last}]"]
            assert problems(spoilt, golden, exact=exact) == [f"{metric}: no finite number in the golden values at steps [{last}]"]
            assert len(problems(spoilt, spoilt, exact=exact)) == 2, "two that are broken alike do not agree"


def test_what_is_exact(golden):
    loss = golden["lm loss"].values[6]
    for difference, holds in ((0.0, True), (1e-5, True), (2e-5, False)):
        found = problems(golden, altered(golden, "lm loss", {6: round(loss + difference, 5)}), exact=True)
        assert (found == []) is holds, difference
    assert problems(golden, altered(golden, "lm loss", {6: loss * 1.04}), exact=False) == []
    tokens = golden["num-tokens"].values[6]
    for exact in (True, False):
        assert problems(golden, altered(golden, "num-tokens", {6: tokens + 1}), exact=exact), "what is planned is the same everywhere"


def test_the_median_of_times_is_compared():
    tolerances = {"iteration-time": TOLERANCES["iteration-time"]}
    times = {"iteration-time": Series(values={1: 9.0, 2: 1.0, 3: 1.0})}
    for median, holds in ((1.04, True), (1.07, False)):
        other = {"iteration-time": Series(values={1: 5.0, 2: median, 3: 0.1})}
        assert (compare(times, other, tolerances, exact=True) == []) is holds


def test_values_are_rounded_as_megatron_lm_rounds_them():
    assert [rounded(value) for value in (3.979433, 12.0, 0.0, 0.000695406123, math.nan, None)] == [3.97943, 12.0, 0.0, 0.000695406, None, None]
    found = as_series({"lm loss": {3: 1.0, 6: math.nan}, "other": {1: 1.0}}, ("lm loss", "absent"))
    assert found == {"lm loss": Series(values={3: 1.0, 6: None}, step_interval=3)}


@pytest.mark.parametrize("name", ON_CPU)
def test_every_cpu_case_has_golden_values_of_its_metrics_in_megatron_lms_form(name):
    case = CASES[name]
    content = json.loads(case.golden_path.read_text())
    assert set(content) == set(case.metrics) and "lm loss" in content
    for entry in content.values():
        assert set(entry) == {"start_step", "end_step", "step_interval", "values"}
        steps = [int(step) for step in entry["values"]]
        assert steps == list(range(entry["start_step"], entry["end_step"] + 1, entry["step_interval"]))
    assert [int(step) for step in content["lm loss"]["values"]] == list(range(1, case.iterations + 1))
    assert content["lm loss"]["values"][str(case.iterations)] < content["lm loss"]["values"]["1"], "something was learned"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.same_losses_as])
def test_golden_values_of_another_division_are_those_of_the_same_training(name):
    """Whoever updates one case alone, because its division went wrong, meets this."""
    case, base = CASES[name], CASES[CASES[name].same_losses_as]
    tolerances = {metric: TOLERANCES[metric] for metric in ("lm loss", "grad-norm", "learning-rate", "num-tokens")}
    assert compare(read_golden(base.golden_path), read_golden(case.golden_path), tolerances, exact=True) == []


def test_files_that_are_not_golden_values_are_refused(tmp_path):
    path = tmp_path / "golden.json"
    with pytest.raises(GoldenError, match="there are no golden values at"):
        read_golden(path)
    entry = {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 1.0, "2": 2.0}}
    for wrong in ("{", "[]", "{\"lm loss\": {}}", json.dumps({"lm loss": entry | {"end_step": 3}}), json.dumps({"lm loss": entry | {"values": {}}})):
        path.write_text(wrong)
        with pytest.raises(GoldenError, match="is not a file of golden values"):
            read_golden(path)
    with pytest.raises(GoldenError, match=r"lm loss has no finite value at steps \[2\]"):
        write_golden(path, {"lm loss": Series(values={1: 1.0, 2: None})})


# Case files ------------------------------------------------------------------------------------------------------------


def with_config(tmp_path, **changes):
    content = yaml.safe_load((CASES[BASE].folder / "model_config.yaml").read_text()) | changes
    folder = tmp_path / "llama" / "changed"
    folder.mkdir(parents=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return load_case(folder, root=tmp_path)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"METRIC": []}, "unknown keys"),
        ({"DATA": None}, "lacks \\['DATA'\\]"),
        ({"TEST_TYPE": "frozen"}, "TEST_TYPE is 'frozen'; there are regular, "),
        ({"METRICS": ["lm-loss"]}, "METRICS or PLAN_METRICS name \\['lm-loss'\\]; there are \\['lm loss', "),
        ({"TOLERANCES": {"lm-loss": {"exact": 1.0}}}, "TOLERANCES of \\['lm-loss'\\]"),
        ({"TOLERANCES": {"lm loss": {"exat": 1.0}}}, "TOLERANCES: lm loss: {'exat': 1.0}; give approximate or exact"),
        ({"DATA": {"documents": {"count": 9}}}, "DATA: documents needs count and longest"),
        ({"DATA": [1]}, "DATA must hold keys and values"),
        ({"MODEL_ARGS": {"--data-path": "${DATAPATH}/documents"}}, "--data-path names \\${DATAPATH}; there are DATA_PATH, "),
        ({"TEST_TYPE": "ckpt-resume"}, "TEST_TYPE ckpt-resume looks at checkpoints: MODEL_ARGS needs --save"),
    ],
)
def test_a_case_file_with_a_mistake_is_refused(tmp_path, changes, told):
    with pytest.raises(CaseError, match="llama/changed: .*" + told):
        with_config(tmp_path, **changes)


def test_other_mistakes_of_case_files_end_the_command_with_their_case(tmp_path, monkeypatch, capsys):
    with_config(tmp_path, SAME_LOSSES_AS="llama/nope")
    with pytest.raises(CaseError, match="llama/changed: SAME_LOSSES_AS: there is no case llama/nope; there are llama/changed"):
        load_cases(tmp_path)
    (tmp_path / "llama" / "changed" / "model_config.yaml").write_text("MODEL_ARGS: [")
    monkeypatch.setattr(golden_run, "load_cases", lambda: load_cases(tmp_path))
    with pytest.raises(SystemExit) as left:
        golden_run.main(["--list"])
    assert left.value.code == 2 and "llama/changed: model_config.yaml is no YAML" in capsys.readouterr().err


def test_flags_of_a_case(tmp_path):
    arguments = {"--swiglu": True, "--add-bias-linear": False, "--data-path": "0.7 ${DATA_PATH}/a 0.3 ${DATA_PATH}/b", "--lr": 0.003}
    path = tmp_path / "with a space"
    found = words(arguments, {"DATA_PATH": path})
    assert found == ["--swiglu", "--no-add-bias-linear", "--data-path", "0.7", f"{path}/a", "0.3", f"{path}/b", "--lr", "0.003"]


@pytest.mark.parametrize("name", CASES)
def test_the_flags_of_every_case_are_flags_of_the_product(name, tmp_path):
    """Also of the cases that run elsewhere, and with the changes of a second run."""
    case, paths = CASES[name], dict.fromkeys(("DATA_PATH", "OUTPUT_PATH", "CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH"), tmp_path)
    for arguments, world in ((case.arguments, case.world_size), (case.arguments | case.second_arguments, case.second_world_size)):
        run = parse_arguments(words(arguments, paths), world_size=world)
        assert run.training.train_iters == case.iterations and run.logging.run_dir == str(tmp_path)
        assert (run.checkpoint.save is not None) is (case.test_type != "regular")
        if case.test_type in ("ckpt-resume", "frozen-resume"):
            assert run.checkpoint.save_interval == case.iterations // 2, "the middle has a checkpoint"


# Updating --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def updating(tmp_path, monkeypatch, golden, capsys):
    """The command on a copy of a case, whose runs give `values` and find `problems`."""
    shutil.copytree(CASES[BASE].folder, tmp_path / BASE)
    monkeypatch.setattr(golden_run, "load_cases", lambda: load_cases(tmp_path))

    def command(*flags: str, values: dict[str, Series] = golden, problems: tuple[str, ...] = ()) -> tuple[int, str]:
        monkeypatch.setattr(golden_run, "run_case", lambda case, folder: Found(values=values, problems=list(problems)))
        status = golden_run.main([BASE, *flags])
        return status, capsys.readouterr().out

    command.path = tmp_path / BASE / CASES[BASE].golden_path.name
    return command


def test_an_update_shows_what_changes_and_writes_only_when_told(updating, golden):
    before = updating.path.read_bytes()
    new = altered(golden, "lm loss", {5: round(golden["lm loss"].values[5] * 1.06, 5), 7: 3.5})
    status, output = updating(values=new)
    assert status == 1 and f"FAILED {BASE}" in output and "the golden values lack steps [7]" in output
    status, output = updating("--update-golden", values=new)
    assert status == 0 and updating.path.read_bytes() == before and "nothing written" in output
    old = golden["lm loss"].values[5]
    assert ["lm", "loss", "5", f"{old:g}", f"{new['lm loss'].values[5]:g}", "+6.00e-02"] in [line.split() for line in output.splitlines()]
    assert ["lm", "loss", "7", "-", "3.5"] in [line.split() for line in output.splitlines()] and "2 of " in output
    status, output = updating("--update-golden", "--write", values=new)
    assert status == 0 and read_golden(updating.path) == new
    status, output = updating(values=new)
    assert status == 0 and f"passed {BASE}" in output


@pytest.mark.parametrize("fault", ["not finite", "metric missing", "wrong in itself"])
def test_values_of_a_broken_run_are_not_written(updating, golden, fault):
    before = updating.path.read_bytes()
    wrong = {
        "not finite": dict(values=altered(golden, "lm loss", {5: None})),
        "metric missing": dict(values={metric: series for metric, series in golden.items() if metric != "grad-norm"}),
        "wrong in itself": dict(problems=("the resumed run differs at step 4",)),
    }
    status, output = updating("--update-golden", "--write", **wrong[fault])
    assert status == 1 and "FAILED" in output and updating.path.read_bytes() == before


def test_a_damaged_file_can_be_replaced(updating, golden):
    updating.path.write_text("{")
    status, output = updating()
    assert status == 1 and "is not a file of golden values" in output and "--update-golden" in output
    status, output = updating("--update-golden", "--write")
    assert status == 0 and "the old one is of no use and would be replaced" in output and read_golden(updating.path) == golden


def test_more_than_is_compared_is_told(updating, golden):
    write_golden(updating.path, golden | {"extra": golden["lm loss"]})
    status, output = updating()
    assert status == 1 and "extra: in the golden values, but METRICS and PLAN_METRICS do not name it" in output
    wider = golden | {"lm loss": Series(values=golden["lm loss"].values, step_interval=2)}
    assert problems(wider, golden, exact=True) == ["lm loss: step_interval 1, golden 2"]


def test_missing_golden_values_are_told_with_how_to_make_them(updating):
    updating.path.unlink()
    status, output = updating()
    assert status == 1 and "there are no golden values at" in output
    assert f"run on this machine: python tests/functional_tests/golden_run.py {BASE} --update-golden" in output
    for case in CASES.values():
        if case.platform != "cpu" and not case.golden_path.exists():
            assert f"on a machine with {case.world_size} x {case.platform}" in golden_run.how_to_make(case)
    assert any(case.platform == "h200" for case in CASES.values())


def test_wrong_usage_is_refused():
    for words_ in (["none/such"], ["--write"], ["--platform", "none"]):
        with pytest.raises(SystemExit) as ended:
            golden_run.main(words_)
        assert ended.value.code == 2


def test_no_golden_file_is_without_its_case():
    known = {case.folder for case in CASES.values()}
    assert {path.parent for path in TEST_CASES.rglob("golden_values_*.json")} <= known
