# SPDX-License-Identifier: Apache-2.0
"""Test cases with golden values: a case is a folder `test_cases/<model>/<case>` with a `model_config.yaml` in Megatron-LM's manner.

| key           | meaning                                                                                                      |
|---------------|--------------------------------------------------------------------------------------------------------------|
| `MODEL_ARGS`  | flags of `pretrain_gpt_thd.py`; `${NAME}` stands for a folder of the run, NAME one of DATA_PATH, OUTPUT_PATH, |
|               | CHECKPOINT_SAVE_PATH, CHECKPOINT_LOAD_PATH                                                                   |
| `MODEL_ARGS_2`| changes for the second run of `checkpoint-consistency` (absent: the same run twice)                            |
| `TEST_TYPE`   | one of `TEST_TYPES`                                                                                          |
| `METRICS`     | metrics of the golden file, as Megatron-LM's scripts read this key                                            |
| `ENV_VARS`    | environment of the run; `NON_DETERMINSTIC_RESULTS: 1` (so spelt there) leaves only the approximate comparison  |
| `DATA`        | name -> `count`, `longest` and perhaps `scale` (of the lengths): documents made at `${DATA_PATH}/<name>`      |
| `WORLD_SIZE`, `WORLD_SIZE_2` | ranks (default 1)                                                                              |
| `PLATFORM`    | `cpu` (default) or the card the golden values belong to                                                      |
| `PLAN_METRICS`| more metrics of the golden file, which Megatron-LM's scripts do not know                                      |
| `TOLERANCES`  | metric -> `exact`, `approximate`, where the defaults do not fit                                              |
| `SAME_LOSSES_AS` | a case with the same documents, model and arithmetic in another division: golden values must be the same     |
"""

import contextlib
import dataclasses
import os
import shlex
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import yaml
from golden_values import TOLERANCES, Series, Tolerance, as_series, read_tensorboard
from training_run import heavy_tailed_lengths, train, write_corpus

from megatron_dyn.training import plots

TEST_CASES = Path(__file__).resolve().parent / "test_cases"
REPOSITORY = TEST_CASES.parents[2]
ENVIRONMENT = "dev"
TIMEOUT_SECS = {"cpu": 120.0}
GPU_TIMEOUT_SECS = 900.0
KEYS = {
    "MODEL_ARGS", "MODEL_ARGS_2", "TEST_TYPE", "METRICS", "ENV_VARS", "DATA", "WORLD_SIZE", "WORLD_SIZE_2", "PLATFORM", "PLAN_METRICS",
    "TOLERANCES", "SAME_LOSSES_AS",
}  # fmt: skip
TEST_TYPES = ("regular", "ckpt-resume", "frozen-resume", "checkpoint-consistency")


REQUIRED_KEYS = {"MODEL_ARGS", "TEST_TYPE", "METRICS", "DATA"}
PATHS = ("DATA_PATH", "OUTPUT_PATH", "CHECKPOINT_SAVE_PATH", "CHECKPOINT_LOAD_PATH")


class CaseError(Exception):
    """A `model_config.yaml` that cannot be run; the message names the case and the key."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One test case, as its file tells."""

    name: str  # <model>/<case>
    folder: Path
    test_type: str
    arguments: Mapping[str, object]
    second_arguments: Mapping[str, object]
    metrics: tuple[str, ...]
    tolerances: Mapping[str, Tolerance]
    data: Mapping[str, Mapping[str, int]]
    world_size: int = 1
    second_world_size: int = 1
    platform: str = "cpu"
    deterministic: bool = True
    same_losses_as: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def golden_path(self) -> Path:
        """Where the golden values are kept."""
        return self.folder / f"golden_values_{ENVIRONMENT}_{self.platform}.json"

    @property
    def iterations(self) -> int:
        """Steps of the whole run."""
        return int(self.arguments["--train-iters"])


def load_case(folder: Path, *, root: Path = TEST_CASES) -> Case:
    """Reads a case's `model_config.yaml`.

    Raises:
        CaseError: a key is unknown, missing or has a value that is none of those possible.
    """
    name = folder.relative_to(root).as_posix()
    try:
        content = yaml.safe_load((folder / "model_config.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CaseError(f"{name}: model_config.yaml is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise CaseError(f"{name}: model_config.yaml must hold keys and values, with {', '.join(sorted(REQUIRED_KEYS))}")
    if unknown := set(content) - KEYS:
        raise CaseError(f"{name}: model_config.yaml has unknown keys {sorted(unknown)}; there are {sorted(KEYS)}")
    if missing := REQUIRED_KEYS - set(content):
        raise CaseError(f"{name}: model_config.yaml lacks {sorted(missing)}")
    _check_values(name, content)
    if content["TEST_TYPE"] not in TEST_TYPES:
        raise CaseError(f"{name}: TEST_TYPE is {content['TEST_TYPE']!r}; there are {', '.join(TEST_TYPES)}")
    metrics = (*content["METRICS"], *content.get("PLAN_METRICS", ()))
    if unknown := set(metrics) - set(TOLERANCES):
        raise CaseError(f"{name}: METRICS or PLAN_METRICS name {sorted(unknown)}; there are {list(TOLERANCES)}")
    given = content.get("TOLERANCES", {})
    if unknown := set(given) - set(metrics):
        raise CaseError(f"{name}: TOLERANCES of {sorted(unknown)}, which are not compared: METRICS and PLAN_METRICS name {list(metrics)}")
    environment = {key: str(value) for key, value in content.get("ENV_VARS", {}).items()}
    world_size = content.get("WORLD_SIZE", 1)
    return Case(
        name=name,
        folder=folder,
        test_type=content["TEST_TYPE"],
        arguments=content["MODEL_ARGS"],
        second_arguments=content.get("MODEL_ARGS_2", {}),
        metrics=metrics,
        tolerances={metric: dataclasses.replace(TOLERANCES[metric], **given.get(metric, {})) for metric in metrics},
        data=content["DATA"],
        world_size=world_size,
        second_world_size=content.get("WORLD_SIZE_2", world_size),
        platform=content.get("PLATFORM", "cpu"),
        deterministic=environment.get("NON_DETERMINSTIC_RESULTS", "0") != "1",
        same_losses_as=content.get("SAME_LOSSES_AS"),
        environment=environment,
    )


def _check_values(name: str, content: Mapping) -> None:
    """What would end in an error of Python's in the middle of a run."""
    for key in ("MODEL_ARGS", "MODEL_ARGS_2", "DATA", "ENV_VARS", "TOLERANCES"):
        if not isinstance(content.get(key, {}), dict):
            raise CaseError(f"{name}: {key} must hold keys and values, not {content[key]!r}")
    for documents, made in content["DATA"].items():
        if not isinstance(made, dict) or not {"count", "longest"} <= made.keys() <= {"count", "longest", "scale"}:
            raise CaseError(f"{name}: DATA: {documents} needs count and longest, perhaps scale, and has {made!r}")
    for flag, value in (content["MODEL_ARGS"] | content.get("MODEL_ARGS_2", {})).items():
        named = {found["named"] or found["braced"] for found in string.Template.pattern.finditer(str(value))} - {None}
        if unknown := named - set(PATHS):
            raise CaseError(f"{name}: {flag} names ${{{sorted(unknown)[0]}}}; there are {', '.join(PATHS)}")
    known = {item.name for item in dataclasses.fields(Tolerance)}
    for metric, tolerance in content.get("TOLERANCES", {}).items():
        if not isinstance(tolerance, dict) or not tolerance.keys() <= known:
            raise CaseError(f"{name}: TOLERANCES: {metric}: {tolerance!r}; give {' or '.join(sorted(known))}")
    if content["TEST_TYPE"] in TEST_TYPES[1:] and "--save" not in content["MODEL_ARGS"]:
        raise CaseError(f"{name}: TEST_TYPE {content['TEST_TYPE']} looks at checkpoints: MODEL_ARGS needs --save (${{CHECKPOINT_SAVE_PATH}})")


def load_cases(root: Path = TEST_CASES) -> dict[str, Case]:
    """Every case by its name.

    Raises:
        CaseError: as `load_case`; or SAME_LOSSES_AS names no case.
    """
    cases = {case.name: case for case in (load_case(path.parent, root=root) for path in sorted(root.glob("*/*/model_config.yaml")))}
    for case in cases.values():
        if case.same_losses_as is not None and case.same_losses_as not in cases:
            raise CaseError(f"{case.name}: SAME_LOSSES_AS: there is no case {case.same_losses_as}; there are {', '.join(cases)}")
    return cases


def words(arguments: Mapping[str, object], paths: Mapping[str, Path]) -> list[str]:
    """Flags as a command line has them: true gives the bare flag, false its `--no-` form; paths are filled in."""
    found = []
    for flag, value in arguments.items():
        if value is True or value is False:
            found.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
            found += [flag, *shlex.split(string.Template(str(value)).substitute(quoted))]
    return found


@dataclass(kw_only=True)
class Launched:
    """A training run of a case: where its files are."""

    run_dir: Path
    checkpoints: Path

    def series(self, case: Case, *, run: int | None = 0) -> dict[str, Series]:
        """Its metrics, as TensorBoard has them."""
        return as_series(read_tensorboard(self.run_dir / "tensorboard", run=run), case.metrics)


class Launcher:
    """Runs a case's training: on forked ranks on a CPU (no interpreter starts), under torchrun elsewhere.

    Args:
        case: what is run.
        folder: documents, records and checkpoints go here.
        torchrun: start new processes also on a CPU.
    """

    def __init__(self, case: Case, folder: Path, *, torchrun: bool | None = None) -> None:
        self.case, self.folder = case, folder
        self.torchrun = case.platform != "cpu" if torchrun is None else torchrun
        self.data = folder / "data"
        self.data.mkdir(parents=True, exist_ok=True)
        for number, (name, documents) in enumerate(case.data.items()):
            scale = documents.get("scale", 1)
            lengths = heavy_tailed_lengths(documents["count"], longest=documents["longest"] // scale, seed=3 + number)
            write_corpus(self.data / name, [length * scale for length in lengths], seed=5 + number)

    def __call__(
        self, name: str, *, load: Path | None = None, run_dir: Path | None = None, second: bool = False, saves: bool = True
    ) -> Launched:
        """One training run.

        Args:
            name: of its folder.
            load: checkpoints to go on from; None starts from scratch.
            run_dir: another run's folder to go on writing in.
            second: with the changes of `MODEL_ARGS_2`.
            saves: False leaves `--save` out.
        """
        launched = Launched(run_dir=run_dir or self.folder / name, checkpoints=self.folder / name / "checkpoints")
        paths = {
            "DATA_PATH": self.data, "OUTPUT_PATH": launched.run_dir, "CHECKPOINT_SAVE_PATH": launched.checkpoints,
            "CHECKPOINT_LOAD_PATH": load or launched.checkpoints,
        }  # fmt: skip
        arguments = self.case.arguments | (self.case.second_arguments if second else {})
        argv = words({flag: value for flag, value in arguments.items() if saves or flag not in ("--save", "--save-interval")}, paths)
        world = self.case.second_world_size if second else self.case.world_size
        if self.torchrun:
            self._with_torchrun(world, argv)
        else:
            with _surroundings(self.case.environment):
                train(world, argv, self.folder / "outputs", timeout=TIMEOUT_SECS["cpu"])
        return launched

    def _with_torchrun(self, world: int, argv: list[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "pretrain_gpt_thd.py", *argv]
        environment = os.environ | self.case.environment | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        limit = TIMEOUT_SECS.get(self.case.platform, GPU_TIMEOUT_SECS)
        with open(self.folder / "torchrun.txt", "w+") as output:
            started = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                status = started.wait(limit)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # torchrun's ranks are in its group: none is left behind
            output.seek(0)
            assert status == 0, f"exit status {status} of {shlex.join(command)}\n{output.read()}"


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """Environment for forked ranks, which draw no pictures: nobody looks at them, and they take as long as the steps."""
    with mock.patch.dict(os.environ, environment), mock.patch.object(plots, "plot_run"), mock.patch.object(plots, "plot_packing"):
        yield


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read without the code that loads checkpoints into a model."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    content: dict = {}
    _load_state_dict(content, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {name: value for name, value in content.items() if torch.is_tensor(value)}
