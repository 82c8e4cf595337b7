# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn plan`: what it prints and writes, what it refuses, and that it plans as a run would."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_dyn.__main__ import main
from megatron_dyn.planning import Planner
from megatron_dyn.training.plan_settings import build_parser, read_lengths, read_request

LENGTHS = np.clip(np.random.default_rng(1).lognormal(5.0, 1.2, 1200), 1, None).astype(np.int64)
PIPELINE = "--data-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2".split()
MODEL = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4 --vocab-size 32000".split()


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "mine & <yours>.txt"
    path.write_text("\n".join(map(str, LENGTHS.tolist())) + "\n")
    return path


def plan(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_says_what_the_planner_says(capsys, lengths_file):
    status, out, _ = plan(
        capsys, "--lengths", lengths_file, "--max-tokens-per-microbatch", 1024, "--global-batch-size", 200, *PIPELINE, "--json"
    )
    found = json.loads(out)["plans"]
    request = read_request(
        vars(
            build_parser().parse_args(
                ["--lengths", str(lengths_file), "--max-tokens-per-microbatch", "1024", "--global-batch-size", "200", *PIPELINE]
            )
        )
    )
    planner = Planner(LENGTHS, request.plan_config())
    assert status == 0 and found["steps"] == planner.steps_per_epoch() == 6 and found["settings"]["alignment"] == 2
    assert found["tokens"] == LENGTHS.sum() == found["corpus"]["tokens"]
    assert found["per_step"]["fill"] == [planner.plan(step).stats.fill for step in range(6)]
    assert found["pipeline"] == {"pipeline_parallel": 2, "virtual_stages": 1}
    assert set(found["ways"]) == {"planned", "in_order", "karmarkar_karp", "fixed_length", "padded"}


def test_the_page_is_whole_and_asks_nobody(capsys, lengths_file, tmp_path):
    arguments = ("--lengths", lengths_file, "--max-tokens-per-microbatch", 1024, "--global-batch-tokens", 20000, *PIPELINE, "--steps", 3)
    status, out, err = plan(capsys, *arguments, "--num-virtual-stages-per-pipeline-rank", 2, "--output", tmp_path / "out")
    assert status == 0 and "simulated time" in out and "plan.html" in err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "lengths.png", "pipeline.png", "plan.html", "plan.json", "step.png", "steps.png",
    ]  # fmt: skip
    page = (tmp_path / "out" / "plan.html").read_text()
    assert len(re.findall(r'src="data:image/png;base64,iVBOR', page)) == 4 == page.count("<img ")
    assert not re.search(r"https?:|<script|<link|url\(|@import", page)
    assert "mine &amp; &lt;yours&gt;.txt" in page and "<yours>" not in page
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["plans"]["steps"] == 3


def test_a_corpus_is_planned_as_a_run_plans_it(shared, capsys, tmp_path):
    """The settings, and so the digests, are those of `pretrain_gpt_thd.py` with the same flags, also from its file of settings."""
    from megatron_dyn.training.arguments import parse_arguments

    prefix = str(shared / "data/megatron/mix_heavytail_mistral_v1")
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"data_path: [{prefix}]\nglobal_batch_tokens: 50000\ntoken_bucket: 64\nlr: 1e-3\ntrain_iters: 3\nvocab_size: 32000\n"
    )
    flags = [
        "--config", str(settings), "--max-tokens-per-microbatch", "4096", "--pipeline-model-parallel-size", "2",
        "--num-virtual-stages-per-pipeline-rank", "2", "--oversize", "truncate", "--seed", "7", *MODEL,
    ]  # fmt: skip
    request = read_request(vars(build_parser().parse_args(flags + ["--data-parallel-size", "2"])))
    assert request.plan_config() == parse_arguments(flags, world_size=4).plan_config(data_parallel_size=2)
    from megatron_dyn.corpus import open_corpus

    train = open_corpus([prefix], seed=7).train
    assert request.fingerprint == train.fingerprint and np.array_equal(request.lengths, train.lengths)


def test_no_torch_is_needed(lengths_file):
    program = (
        "import sys; from megatron_dyn.__main__ import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'megatron.core'} & set(sys.modules), 'torch was imported'"
    )
    arguments = ["plan", "--lengths", str(lengths_file), "--recommend", "--device-memory-gib", "24", *MODEL, "--steps", "1", "--json"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--max-tokens-per-microbatch", "8"], "exactly one of --global-batch-size"),
        (["--global-batch-size", "8"], "no --max-tokens-per-microbatch.*--recommend proposes one"),
        (["--max-tokens-per-microbatch", "8", "--global-batch-size", "8", "--data-path", "x"], "exactly one of --data-path"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--oversize", "error"], "above the budget"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--steps", "0"], "at least one step"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--data-parallel-size", "0"], "--data-parallel-size is 0"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--hidden-size", "64"], "missing: --num-layers"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--micro-batch-size", "2"], "unrecognized arguments"),
        (["--recommend", *MODEL], "--recommend needs --device-memory-gib"),
        (["--recommend", *MODEL, "--device-memory-gib", "1"], "no budget of use would fit; raise --tensor-model-parallel-size"),
    ],
)
def test_refusals_name_the_way_out(capsys, lengths_file, arguments, message):
    status, out, err = plan(capsys, "--lengths", lengths_file, *arguments)
    assert status == 2 and not out and re.search(message, err), err


def test_lengths_from_files(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([3, 4], dtype=np.uint16))
    assert read_lengths(str(tmp_path / "lengths.npy")).tolist() == [3, 4]
    for name, content in (("words.txt", b"3\nfour\n"), ("empty.txt", b""), ("damaged.npy", b"\x93NUMPY"), ("binary.txt", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"--lengths .*{name}"):
            read_lengths(str(tmp_path / name))
    np.save(tmp_path / "table.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="expected integers in one row"):
        read_lengths(str(tmp_path / "table.npy"))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_lengths(str(tmp_path / "absent.txt"))
