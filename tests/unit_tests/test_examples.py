# SPDX-License-Identifier: Apache-2.0
"""The launch scripts and their settings, run with a stand-in for torchrun and Slurm: what they start has to be accepted."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_dyn.training.arguments import build_parser, parse_arguments
from megatron_dyn.training.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NODE, SLURM = EXAMPLES / "node" / "train_one_gpu_node.sh", EXAMPLES / "slurm" / "train_slurm.sh"
DATA = {"DATA_PATH": "0.7 corpora/a 0.3 corpora/b", "TOKENIZER_MODEL": "tokenizer.model"}
SLURM_JOB = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "gpu[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_SUBMIT_DIR": str(ROOT)}


@pytest.fixture
def stand_ins(tmp_path):
    """Commands that record their arguments: torchrun, srun (which runs what it is given) and scontrol."""
    commands = {
        "torchrun": f"#!{sys.executable}\nimport json, os, sys\njson.dump([sys.argv[1:], os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS')], open({str(tmp_path / 'called')!r}, 'w'))\n",
        "srun": '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
        "scontrol": "#!/bin/sh\nprintf 'gpu7\\ngpu8\\n'\n",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(script, stand_ins, *flags, **environment):
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "HOME": str(stand_ins), **environment}
    result = subprocess.run(["bash", str(script), *flags], cwd=stand_ins, env=environment, text=True, capture_output=True, timeout=30)
    if result.returncode:
        return result.stderr
    arguments, connections = json.loads((stand_ins / "called").read_text())
    assert connections == "1"
    at = arguments.index(str(ROOT / "pretrain_gpt_thd.py"))
    return arguments[:at], arguments[at + 1 :]


def test_the_node_script_starts_a_run_that_is_accepted(stand_ins):
    torchrun, flags = launch(NODE, stand_ins, "--train-iters", "2000", **DATA)
    assert torchrun == ["--standalone", "--nproc-per-node", "8"]
    run = parse_arguments(flags, world_size=8)
    assert run.data.data_path == ["0.7", "corpora/a", "0.3", "corpora/b"]
    assert run.training.train_iters == 2000  # flags win over the file
    assert run.checkpoint.save == run.checkpoint.load == "runs/gpt/checkpoints"
    assert run.parallel.data_parallel_size(8) == 4


def test_the_slurm_script_starts_a_run_that_is_accepted(stand_ins):
    torchrun, flags = launch(SLURM, stand_ins, **DATA, **SLURM_JOB)
    assert torchrun == "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 123456 --rdzv-endpoint gpu7:23456".split()
    run = parse_arguments(flags, world_size=16)
    assert run.parallel.data_parallel_size(16) == 2
    assert run.parallel.virtual_pipeline_model_parallel_size == 2


@pytest.mark.parametrize("script", [NODE, SLURM])
@pytest.mark.parametrize("missing", sorted(DATA))
def test_a_script_without_data_says_what_to_set(script, missing, stand_ins):
    settings = {name: value for name, value in DATA.items() if name != missing}
    assert f"set {missing} to" in launch(script, stand_ins, **settings, **SLURM_JOB)


COMPARISONS = sorted((EXAMPLES / "convergence").glob("*.yaml"))


@pytest.mark.parametrize("config", sorted(set(EXAMPLES.glob("**/*.yaml")) - set(COMPARISONS)), ids=lambda path: path.name)
def test_every_config_is_accepted_and_a_misspelt_one_is_not(config, tmp_path):
    flags = ["--data-path", "corpora/mine", "--tokenizer-model", "tokenizer.model", "--save", "checkpoints"]
    parse_arguments(["--config", str(config), *flags], world_size=16)
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text(re.sub("num_layers", "num_leyers", config.read_text()))
    with pytest.raises(ConfigError, match="num_leyers"):
        parse_arguments(["--config", str(misspelt), *flags], world_size=16)


@pytest.fixture
def convergence():
    spec = importlib.util.spec_from_file_location("run_convergence", EXAMPLES / "convergence" / "run_convergence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("description", COMPARISONS, ids=lambda path: path.name)
def test_every_run_of_a_comparison_is_accepted_and_only_the_grouping_differs(description, convergence):
    runs = convergence.plan_of(yaml.safe_load(description.read_text()))
    data = ["--data-path", "corpora/mine", "--tokenizer-model", "tokenizer.model", "--save", "checkpoints"]
    divided = [name for name, flags, _ in runs if "--tensor-model-parallel-size" in flags]
    settings = {name: parse_arguments([*flags, *data], world_size=2 if name in divided else 1).as_dict() for name, flags, _ in runs}
    assert len(settings) == len(runs) and {fault for *_, fault in runs} in ({None}, {None, "normaliser", "attention"})
    ways = {name: values["data"].pop("microbatching") for name, values in settings.items()}
    for name, values in settings.items():
        values["data"].pop("documents_per_microbatch"), values["training"].pop("seed")
        if name in divided:
            values["parallel"] |= {"tensor_model_parallel_size": 1, "sequence_parallel": False}
            values["overlap"]["tp_comm_overlap"] = False
    assert len({repr(values) for values in settings.values()}) == 1
    assert all(name.startswith((way, "negative-control")) for name, way in ways.items())


@pytest.fixture
def two_arms(convergence, tmp_path, monkeypatch):
    """The command on a description of two arms and two seeds; runs are made by `make`, and no report."""
    description = tmp_path / "two.yaml"
    description.write_text("seeds: [1, 2]\nbase: {num_layers: 2}\narms: {a: {}, b: {microbatching: packed-fixed}}\nnegative_controls: [attention]\n")
    monkeypatch.setattr(convergence, "report", lambda *arguments: 0)

    def command(*words, lr="1"):
        monkeypatch.setattr(sys, "argv", ["run_convergence.py", str(description), "--output", str(tmp_path / "runs"), *words, "--", "--lr", lr])
        return convergence.main()

    command.description = description
    return command


def finished(folder, *arguments, **settings):
    (folder / "summary.json").write_text("{}")
    return True


def test_a_run_with_other_flags_is_not_taken_for_the_one_asked_for(convergence, two_arms, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "make", finished)
    assert two_arms() == 0
    with pytest.raises(SystemExit) as left:
        two_arms(lr="2")
    assert left.value.code == 2 and "a/seed-1 holds a run with other flags (--lr 1; now --lr 2)" in capsys.readouterr().err


def test_what_is_wrong_is_refused_before_the_first_run(convergence, two_arms, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "make", None)
    good = two_arms.description.read_text()
    for words, changed, told in (
        (["--only", "c"], good, "--only names ['c']"),
        (["--seeds", "9"], good, "--seeds names [9]"),
        ([], good.replace("attention", "atention"), "negative_controls name ['atention']"),
        ([], good.replace("seeds", "seed"), "must have seeds, base and arms"),
        ([], "", "must have seeds, base and arms"),
    ):
        two_arms.description.write_text(changed)
        with pytest.raises(SystemExit) as left:
            two_arms(*words)
        assert left.value.code == 2 and told in capsys.readouterr().err


def test_a_comparison_keeps_what_is_finished_and_makes_the_rest_again(convergence, two_arms, tmp_path, monkeypatch, capsys):
    made = []

    def make(folder, flags, fault, launcher, deadline, *, checkpoints):
        made.append(str(folder.relative_to(tmp_path / "runs")))
        folder.mkdir(parents=True, exist_ok=True)
        if len(made) == 2:
            return False  # time is over in the second run
        (folder / "summary.json").write_text("{}")
        return True

    monkeypatch.setattr(convergence, "make", make)
    assert two_arms() == 3 and made == ["a/seed-1", "b/seed-1"]
    assert "the same command goes on" in capsys.readouterr().out
    assert two_arms() == 0 and made[2:] == ["b/seed-1", "a/seed-2", "b/seed-2", "negative-control/attention"]
    assert two_arms() == 0 and len(made) == 6


@pytest.mark.parametrize("text", [EXAMPLES / "README.md", NODE, SLURM], ids=lambda path: path.name)
def test_flags_and_files_named_in_the_examples_exist(text):
    known = set(build_parser().format_help().replace(",", " ").split())
    words = re.findall(r"`(--[a-z-]+)", text.read_text())
    assert {word for word in words if word not in known} == set()
    links = re.findall(r"\]\((?!http)([^)#]+)\)", text.read_text())
    assert [link for link in links if not (text.parent / link).exists()] == []
