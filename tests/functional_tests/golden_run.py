# SPDX-License-Identifier: Apache-2.0
"""Runs test cases and compares them with their golden values (docs/functional_tests.md).

    python tests/functional_tests/golden_run.py [CASE ...]                          run and compare
    python tests/functional_tests/golden_run.py [CASE ...] --update-golden          show what would change in the golden values
    python tests/functional_tests/golden_run.py [CASE ...] --update-golden --write  and write it

| TEST_TYPE              | runs                                                                       | besides the golden values                    |
|------------------------|----------------------------------------------------------------------------|----------------------------------------------|
| regular                | one                                                                        |                                              |
| ckpt-resume            | one that saves in the middle; a second goes on from there in its folder    | second halves, last checkpoints: equal bits  |
| frozen-resume          | one that saves in the middle; two that go on from that checkpoint          | all three: equal bits; checkpoint untouched  |
| checkpoint-consistency | two, alike or (MODEL_ARGS_2) divided otherwise                             | last checkpoints: equal bits, or within 1e-5 |
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

from golden_cases import Case, CaseError, Launched, Launcher, checkpoint_tensors, load_cases  # noqa: E402
from golden_values import GoldenError, Series, compare, describe_changes, read_golden, write_golden  # noqa: E402

from megatron_dyn.training.metrics_file import read_metrics  # noqa: E402

OTHER_DIVISION = 1e-5  # largest difference of a tensor after the same steps in another division, relative to its largest value
LATEST = "latest_checkpointed_iteration.txt"
REPEATED = ("lm loss", "grad-norm", "learning-rate", "documents-digest", "T", "consumed-tokens")  # what a resumed run must give again


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came out of a case's runs: metrics of the first one, and what was wrong without looking at golden values."""

    values: dict[str, Series]
    problems: list[str]


def run_case(case: Case, folder: Path, *, torchrun: bool | None = None) -> Found:
    """Runs a case as its TEST_TYPE says."""
    launch = Launcher(case, folder, torchrun=torchrun)
    first = launch("first")
    return Found(values=first.series(case), problems=_AFTER_THE_FIRST[case.test_type](case, launch, first))


def check_case(case: Case, found: Found, *, approximate: bool = False) -> list[str]:
    """What is wrong with a case: its own checks and its golden values.

    Raises:
        GoldenError: there are no golden values, or they cannot be read.
    """
    try:
        golden = read_golden(case.golden_path)
    except GoldenError as error:
        raise GoldenError(f"{case.name}: {error}. {how_to_make(case)}") from error
    surplus = [f"{metric}: in the golden values, but METRICS and PLAN_METRICS do not name it" for metric in golden if metric not in case.metrics]
    return found.problems + surplus + compare(golden, found.values, case.tolerances, exact=case.deterministic and not approximate)


def how_to_make(case: Case) -> str:
    """What to do where golden values are missing."""
    where = "on this machine" if case.platform == "cpu" else f"on a machine with {case.world_size} x {case.platform}"
    return (
        f"To make them, run {where}: python tests/functional_tests/golden_run.py {case.name} --update-golden, look at the values, "
        f"run it again with --write, and commit {case.golden_path.name} with the reason"
    )


def _regular(case: Case, launch: Launcher, first: Launched) -> list[str]:
    return []


def _ckpt_resume(case: Case, launch: Launcher, first: Launched) -> list[str]:
    whole = _steps(first)
    second = launch("second", load=_middle_alone(case, first, launch.folder / "middle"), run_dir=first.run_dir)
    problems = _differences(whole, _steps(second), after=0, what="the resumed run")  # its folder keeps the first half
    last = f"iter_{case.iterations:07d}"
    problems += compare_checkpoints(first.checkpoints / last, second.checkpoints / last, relative=0.0)
    resumed, middle = second.series(case, run=1), case.iterations // 2
    if not resumed or any(min(series.values) <= middle for series in resumed.values()):
        problems.append(f"TensorBoard: the second file of events does not begin after the checkpoint of iteration {middle}")
    return problems


def _frozen_resume(case: Case, launch: Launcher, first: Launched) -> list[str]:
    frozen = _middle_alone(case, first, launch.folder / "frozen")
    content = _contents(frozen)
    whole, middle, problems = _steps(first), case.iterations // 2, []
    for name in ("second", "third"):
        resumed = _steps(launch(name, load=frozen, saves=False))
        problems += _differences(whole, resumed, after=middle, what=f"the {name} run, from the frozen checkpoint,")
    if _contents(frozen) != content:
        problems.append("the frozen checkpoint was changed by the runs that loaded it")
    return problems


def _checkpoint_consistency(case: Case, launch: Launcher, first: Launched) -> list[str]:
    second = launch("second", second=True)
    alike = not case.second_arguments and case.second_world_size == case.world_size
    last = f"iter_{case.iterations:07d}"
    return compare_checkpoints(first.checkpoints / last, second.checkpoints / last, relative=0.0 if alike else OTHER_DIVISION)


_AFTER_THE_FIRST: dict[str, Callable[[Case, Launcher, Launched], list[str]]] = {
    "regular": _regular,
    "ckpt-resume": _ckpt_resume,
    "frozen-resume": _frozen_resume,
    "checkpoint-consistency": _checkpoint_consistency,
}


def compare_checkpoints(one: Path, other: Path, *, relative: float) -> list[str]:
    """Where the tensors (weights, moments of the optimizer) of two checkpoints differ by more than `relative` of their largest value."""
    first, second = checkpoint_tensors(one), checkpoint_tensors(other)
    problems = [f"checkpoints: only one of them has {name}" for name in sorted(first.keys() ^ second.keys())]
    if not first:
        problems.append(f"checkpoints: {one} holds no tensors")
    for name in sorted(first.keys() & second.keys()):
        a, b = first[name].double(), second[name].double()
        if a.shape != b.shape:
            problems.append(f"checkpoints: {name} has shapes {tuple(a.shape)} and {tuple(b.shape)}")
            continue
        difference = (a - b).abs().max().item()
        if not difference <= relative * a.abs().max().item():  # so that a NaN counts
            problems.append(f"checkpoints: {name} differs by {difference:.2e}, its largest value is {a.abs().max().item():.2e}")
    return problems


def _steps(launched: Launched) -> dict[int, dict]:
    return {step["iteration"]: {key: step[key] for key in REPEATED} for step in read_metrics(launched.run_dir).steps}


def _differences(whole: dict[int, dict], resumed: dict[int, dict], *, after: int, what: str) -> list[str]:
    """Records of a resumed run that are not, bit for bit, those of the unbroken one."""
    expected = {step: record for step, record in whole.items() if step > after}
    problems = []
    if resumed.keys() != expected.keys():
        problems.append(f"{what} has steps {sorted(resumed)}, the unbroken run {sorted(expected)}")
    for step in sorted(expected.keys() & resumed.keys()):
        unlike = [key for key in REPEATED if expected[step][key] != resumed[step][key]]
        problems += [f"{what} differs at step {step}: {key} {resumed[step][key]}, unbroken {expected[step][key]}" for key in unlike]
    return problems


def _middle_alone(case: Case, launched: Launched, folder: Path) -> Path:
    """A folder with the checkpoint of the middle iteration only, as if the run had been ended there."""
    middle = case.iterations // 2
    name = f"iter_{middle:07d}"
    shutil.copytree(launched.checkpoints / name, folder / name)
    (folder / LATEST).write_text(str(middle))
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 all as expected (or updated), 1 something differs or is missing, 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Run test cases and compare them with their golden values.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="<model>/<case> (none: all of --platform)")
    parser.add_argument("--platform", default="cpu", help="take the cases of this platform (default: cpu)")
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    parser.add_argument("--approximate", action="store_true", help="compare approximately only (another processor, another build)")
    parser.add_argument("--output", type=Path, help="keep the runs' folders here (default: nothing is kept)")
    parser.add_argument("--update-golden", action="store_true", help="show how the golden values would change; nothing is written")
    parser.add_argument("--write", action="store_true", help="with --update-golden: write them")
    asked = parser.parse_args(argv)
    try:
        cases = load_cases()
    except CaseError as error:
        parser.error(str(error))
    if unknown := [name for name in asked.cases if name not in cases]:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(cases)}")
    if asked.write and not asked.update_golden:
        parser.error("--write belongs to --update-golden")
    chosen = [cases[name] for name in asked.cases] or [case for case in cases.values() if case.platform == asked.platform]
    if not chosen:
        parser.error(f"no case is for platform {asked.platform}; there are {', '.join(sorted({case.platform for case in cases.values()}))}")
    if asked.list:
        for case in chosen:
            state = "" if case.golden_path.exists() else "  (golden values missing)"
            print(f"{case.name:<44} {case.test_type:<24} {case.world_size} x {case.platform}{state}")
        return 0
    failed = [case.name for case in chosen if not _run_and_tell(case, asked)]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} cases as expected" + (f"; not so: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _run_and_tell(case: Case, asked: argparse.Namespace) -> bool:
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="golden_")) if asked.output is None else asked.output / case.name
    try:
        if asked.output is not None:
            folder.mkdir(parents=True)
        found = run_case(case, folder)
        if asked.update_golden:
            return _update(case, found, write=asked.write)
        problems = check_case(case, found, approximate=asked.approximate)
    except (GoldenError, CaseError, AssertionError, FileExistsError) as error:
        problems = [str(error)]
    finally:
        if asked.output is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{'FAILED' if problems else 'passed'} {case.name} ({time.monotonic() - started:.1f} s)", *problems, sep="\n  ", flush=True)
    return not problems


def _update(case: Case, found: Found, *, write: bool) -> bool:
    """Shows what would change, and writes it if told; values of runs that fail their own checks are not accepted."""
    if found.problems:
        print(f"FAILED {case.name}: no golden values from a run that is wrong in itself", *found.problems, sep="\n  ")
        return False
    old, what = {}, " (new)"
    if case.golden_path.exists():
        try:
            old, what = read_golden(case.golden_path), ""
        except GoldenError as error:
            what = f" (the old one is of no use and would be replaced: {error})"
    print(f"{case.name}: {case.golden_path.name}{what}", describe_changes(old, found.values), sep="\n")
    if missing := [metric for metric in case.metrics if metric not in found.values]:
        print(f"  FAILED: the run has no {', '.join(missing)}")
        return False
    if write:
        write_golden(case.golden_path, found.values)
        print(f"  written to {case.golden_path}")
    else:
        print("  nothing written: add --write once every line above is explained")
    return True


if __name__ == "__main__":
    sys.exit(main())
