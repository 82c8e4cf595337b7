# SPDX-License-Identifier: Apache-2.0
"""Every case of test_cases/ is run as its TEST_TYPE says and compared with its golden values; runs that are broken on purpose are told.

Runs of one case are kept for the tests below it, so that a mutant costs its own run only.
"""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from golden_cases import REPOSITORY, Case, Launcher, load_cases
from golden_run import Found, check_case, compare_checkpoints, how_to_make, run_case
from golden_values import GoldenError, read_tensorboard

from megatron_dyn.training import checkpoint
from megatron_dyn.training.metrics_file import read_metrics

CASES = load_cases()
ON_CPU = [name for name, case in CASES.items() if case.platform == "cpu"]
ELSEWHERE = [name for name, case in CASES.items() if case.platform != "cpu"]
BASE = "llama/tp1_pp1"
RESUMED = "llama/tp1_pp1_dp2_dist_optimizer_resume"
SCRIPTS = "tests/functional_tests/python_test_utils"  # of Megatron-LM


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case that was run, and its folder."""

    found: Found
    folder: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a case, once."""
    kept: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in kept:
            folder = tmp_path_factory.mktemp("case")
            kept[name] = Run(found=run_case(CASES[name], folder), folder=folder)
        return kept[name]

    return run


@pytest.mark.parametrize("name", ON_CPU)
def test_case(run, name):
    """On another processor or build than the golden values were made on, GOLDEN_COMPARISON=approximate leaves out the exact comparison."""
    problems = check_case(CASES[name], run(name).found, approximate=os.environ.get("GOLDEN_COMPARISON") == "approximate")
    assert not problems, "\n".join([f"{name} is not what it was (docs/functional_tests.md says what to do):", *problems])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_case_on_a_gpu(tmp_path, name):
    case = CASES[name]
    if case.platform not in torch.cuda.get_device_name().lower():
        pytest.skip(f"the case is for {case.platform}, this is {torch.cuda.get_device_name()}")
    if torch.cuda.device_count() < case.world_size:
        pytest.skip(f"needs {case.world_size} cards, there are {torch.cuda.device_count()}")
    found = run_case(case, tmp_path)
    assert not found.problems, "\n".join(found.problems)
    if not case.golden_path.exists():
        pytest.skip(f"{name} ran, but there are no golden values to compare it with. {how_to_make(case)}")
    problems = check_case(case, found)
    assert not problems, "\n".join(problems)


def test_the_first_file_of_events_tells_what_the_records_tell(run):
    """Golden values come from TensorBoard, as Megatron-LM's scripts read it: under its tags, as many steps, the same numbers."""
    run_dir = run(BASE).folder / "first"
    scalars, steps = read_tensorboard(run_dir / "tensorboard", run=0), read_metrics(run_dir).steps
    assert len(steps) == CASES[BASE].iterations
    for tag, key in {"lm loss": "lm loss", "grad-norm": "grad-norm", "learning-rate": "learning-rate", "iteration-time": "step-time"}.items():
        assert scalars[tag] == pytest.approx({step["iteration"]: step[key] for step in steps}, rel=1e-6)


def test_a_resumed_run_continues_the_events_in_a_file_of_its_own(run):
    events = run(RESUMED).folder / "first" / "tensorboard"
    middle, last = CASES[RESUMED].iterations // 2, CASES[RESUMED].iterations
    assert list(read_tensorboard(events, run=0)["lm loss"]) == list(range(1, last + 1))
    assert list(read_tensorboard(events, run=1)["lm loss"]) == list(range(middle + 1, last + 1))


@pytest.mark.parametrize("policy, counted", [("split", "split-documents"), ("truncate", "truncated-documents"), ("drop", "dropped-documents")])
def test_the_cases_of_oversize_policies_meet_oversize_documents(run, policy, counted):
    steps = read_metrics(run(f"gpt2/oversize_{policy}").folder / "first").steps
    assert sum(step[counted] for step in steps) >= 3


# Mutants ---------------------------------------------------------------------------------------------------------------


def mutant(case: Case, folder: Path, **arguments: object) -> list[str]:
    """What a run with changed flags is told to have wrong, by the approximate comparison alone."""
    changed = dataclasses.replace(case, arguments=case.arguments | {f"--{key.replace('_', '-')}": value for key, value in arguments.items()})
    return check_case(case, run_case(changed, folder), approximate=True)


def test_a_run_with_another_seed_fails_even_approximately(tmp_path):
    problems = mutant(CASES[BASE], tmp_path, seed=4321)
    assert any(problem.startswith("num-tokens: ") for problem in problems) and any(problem.startswith("grad-norm: ") for problem in problems)


@pytest.mark.parametrize("fault", ["normaliser", "attention"])
def test_a_fault_of_the_training_fails(tmp_path, fault):
    """The negative controls of examples/convergence: a mean of the microbatches' means; attention across documents."""
    spec = importlib.util.spec_from_file_location("broken_run", REPOSITORY / "examples" / "convergence" / "broken_run.py")
    broken_run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken_run)
    with broken_run.broken(fault):
        problems = check_case(CASES[BASE], run_case(CASES[BASE], tmp_path))
    assert any(problem.startswith("lm loss: ") for problem in problems) and not any("num-tokens" in problem for problem in problems)


def test_a_run_whose_events_lack_a_step_or_a_metric_fails(run):
    case, found = CASES[BASE], run(BASE).found
    less = {step: value for step, value in found.values["lm loss"].values.items() if step != 4}
    lacking_a_step = found.values | {"lm loss": dataclasses.replace(found.values["lm loss"], values=less)}
    assert check_case(case, Found(values=lacking_a_step, problems=[])) == ["lm loss: the run lacks steps [4]"]
    lacking_a_metric = {metric: series for metric, series in found.values.items() if metric != "grad-norm"}
    assert check_case(case, Found(values=lacking_a_metric, problems=[])) == ["grad-norm: missing in the run"]
    with pytest.raises(GoldenError, match="To make them, run on this machine"):
        check_case(dataclasses.replace(case, folder=case.folder / "absent"), found)


def test_checkpoints_of_other_steps_are_not_the_same(run):
    checkpoints = run(RESUMED).folder / "first" / "checkpoints"
    middle, last = (checkpoints / f"iter_{step:07d}" for step in (CASES[RESUMED].iterations // 2, CASES[RESUMED].iterations))
    assert compare_checkpoints(last, last, relative=0.0) == []
    for relative in (0.0, 1e-5):
        problems = compare_checkpoints(middle, last, relative=relative)
        assert any("optimizer.state.exp_avg." in problem for problem in problems)
        assert any(problem.startswith("checkpoints: decoder.layers.") for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama/tp1_pp1_dropout_frozen_resume", "ckpt-resume"])
def test_a_resume_that_forgets_its_generators_is_told(tmp_path, monkeypatch, name):
    case = CASES["llama/tp1_pp1_dropout_frozen_resume"]
    monkeypatch.setattr(checkpoint, "set_rng_state", lambda *arguments, **named: None)
    found = run_case(dataclasses.replace(case, test_type="ckpt-resume" if name == "ckpt-resume" else case.test_type), tmp_path)
    assert any("differs at step 4: lm loss" in problem for problem in found.problems)


@pytest.mark.slow
def test_torchrun_gives_what_forked_ranks_give(tmp_path, run):
    name = "llama/tp2_pp1_sp_overlap"
    found = run_case(CASES[name], tmp_path, torchrun=True)
    assert found.values == run(name).found.values and found.problems == []


# Megatron-LM's own scripts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron_lm() -> Path:
    """A checkout of Megatron-LM whose comparison scripts can run here (they need pydantic and click)."""
    folder = os.environ.get("MEGATRON_LM")
    if not folder:
        pytest.skip("set MEGATRON_LM to a checkout of Megatron-LM (core_v0.16.1) to have its own scripts compare")
    return Path(folder)


def with_scripts(megatron_lm: Path, *command: str | Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(megatron_lm), os.environ.get("PYTHONPATH", "")])}
    environment.pop("PYTEST_ADDOPTS", None)
    streams = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.run([sys.executable, *map(str, command)], cwd=megatron_lm, env=environment, timeout=200, **streams)


def collect(megatron_lm: Path, case: Case, events: Path, target: Path, *flags: str) -> None:
    done = with_scripts(
        megatron_lm, megatron_lm / SCRIPTS / "get_test_results_from_tensorboard_logs.py", "--logs-dir", events,
        "--train-iters", str(case.iterations), "--output-path", target, "--is-normal-test", "--step-size", "1", *flags,
    )  # fmt: skip
    assert done.returncode == 0 and target.exists(), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [BASE, RESUMED, "gpt2/oversize_drop"])
def test_megatron_lms_scripts_read_events_and_golden_values(run, megatron_lm, tmp_path, name):
    case, events = CASES[name], run(name).folder / "first" / "tensorboard"
    collect(megatron_lm, case, events, tmp_path / "actual.json")
    config = case.folder / "model_config.yaml"
    compare = ["-m", "pytest", "-q", "-p", "no:cacheprovider", megatron_lm / SCRIPTS / "test_pretraining_regular_pipeline.py", "--train-iters",
               str(case.iterations), "--model-config-path", config, "--actual-values-path", tmp_path / "actual.json"]  # fmt: skip
    done = with_scripts(megatron_lm, *compare, "--golden-values-path", case.golden_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    if case.test_type == "ckpt-resume":
        collect(megatron_lm, case, events, tmp_path / "actual_2nd.json", "--is-second-run")
        done = with_scripts(
            megatron_lm, "-m", "pytest", "-q", "-p", "no:cacheprovider", megatron_lm / SCRIPTS / "test_pretraining_resume_checkpoint_pipeline.py",
            "--train-iters", str(case.iterations), "--model-config-path", config,
            "--actual-values-first-run-path", tmp_path / "actual.json", "--actual-values-second-run-path", tmp_path / "actual_2nd.json",
        )  # fmt: skip
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    # Its comparison must also be able to fail on our files: all losses 6 percent off.
    wrong = yaml.safe_load(case.golden_path.read_text())
    wrong["lm loss"]["values"] = {step: value * 1.06 for step, value in wrong["lm loss"]["values"].items()}
    (tmp_path / "wrong.json").write_text(str(wrong).replace("'", '"'))
    done = with_scripts(megatron_lm, *compare, "--golden-values-path", tmp_path / "wrong.json", "--allow-nondeterministic-algo")
    assert done.returncode == 1 and "lm loss" in done.stdout, done.stdout


def test_a_launcher_tells_a_run_that_failed(tmp_path):
    case = dataclasses.replace(CASES[BASE], arguments=CASES[BASE].arguments | {"--lr": -1.0})
    with pytest.raises(AssertionError, match="--lr is -1.0"):
        Launcher(case, tmp_path)("first")
