# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn plan`: what it prints and writes, what it refuses, and that it plans as a run would."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_dyn.__main__ import main
from megatron_dyn.planning import PlanConfig, Planner, report
from megatron_dyn.planning.pictures import bars_of_T
from megatron_dyn.training import plan_settings
from megatron_dyn.training.config import DataConfig
from megatron_dyn.training.plan_from_settings import AS_GIVEN, cost_model, in_flags, planner_config
from megatron_dyn.training.plan_settings import build_parser, read_flags, read_lengths, read_request

LENGTHS = np.clip(np.random.default_rng(1).lognormal(5.0, 1.2, 1200), 1, None).astype(np.int64)
PIPELINE = "--data-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2".split()
SIZES = "--max-tokens-per-microbatch 1024 --global-batch-size 200".split()
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


def planners_of(flags, settings, monkeypatch, *, ranks):
    """The planner of a run with these flags, and that of the plan command."""
    from megatron_dyn.training import inputs
    from megatron_dyn.training.arguments import parse_arguments

    config = ["--config", str(settings)] if settings else []
    run = parse_arguments([*config, *flags], world_size=ranks)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(inputs, "layers_for", lambda run: "local")  # FP8 needs a GPU to run, not to be planned
    request = read_request(read_flags([*config, *flags, "--data-parallel-size", str(run.parallel.data_parallel_size(ranks))])[0])
    return inputs.Inputs(run).planner, Planner(request.lengths, request.plan_config(), request.fingerprint)


TOKENIZER = "data/tokenizers/mistral_v1_32k.model"


@pytest.mark.parametrize(
    "flags,file,ranks",
    [
        ("--vocab-size 32000", "", 1),
        (f"--tokenizer-model {TOKENIZER}", "vocab_size: 9", 2),
        ("--vocab-size 32001 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --oversize truncate --seed 7", "", 4),
        ("--fp8-format hybrid --bf16 --tensor-model-parallel-size 2 --sequence-parallel", f"tokenizer_model: {TOKENIZER}", 4),
        ("--vocab-size 32000 --document-order length-window --length-window 500 --drop-last", "token_bucket: 64\nlength_window: 100", 2),
        ("--vocab-size 32000 --microbatching packed-fixed --global-batch-size 40", "data:\n  global_batch_tokens: 50000", 2),
        ("--vocab-size 32000 --microbatching fixed-count --documents-per-microbatch 3 --max-documents-per-microbatch 2", "", 2),
        ("--vocab-size 64000 --max-sum-squares-per-microbatch 9000000 --split 3,1 --position-embedding-type none", "swiglu: false", 2),
    ],
)
def test_the_plans_are_those_of_a_run_with_the_same_flags(shared, monkeypatch, tmp_path, flags, file, ranks):
    monkeypatch.chdir(shared)
    settings = tmp_path / "run.yaml"
    settings.write_text(f"global_batch_tokens: 60000\nmax_tokens_per_microbatch: 4096\nlr: 1e-3\ntrain_iters: 3\n{file}\n".replace(
        "global_batch_tokens: 60000\n", "" if "global_batch" in file else "global_batch_tokens: 60000\n"))  # fmt: skip
    shape = "--data-path data/megatron/mix_heavytail_mistral_v1 --num-layers 8 --hidden-size 64 --num-attention-heads 4"
    trained, shown = planners_of([*shape.split(), *flags.split()], settings, monkeypatch, ranks=ranks)
    assert trained.config == shown.config
    assert [trained.plan(step).digest for step in (0, 1, 30)] == [shown.plan(step).digest for step in (0, 1, 30)]


def without_length_window(data, *rest, **given):
    return planner_config({name: value for name, value in data.items() if name != "length_window"}, *rest, **given)


def without_vocabulary(model, *, cost_file, vocab_size):
    return cost_model(model, cost_file=cost_file, vocab_size=0)


@pytest.mark.parametrize(
    "name,broken,flags",
    [
        ("planner_config", without_length_window, "--document-order length-window --length-window 500"),
        ("cost_model", without_vocabulary, ""),
    ],
)
def test_a_setting_that_the_command_forgets_is_noticed(shared, monkeypatch, name, broken, flags):
    """The comparison of digests above would fail: mutants of the command's side."""
    monkeypatch.chdir(shared)
    monkeypatch.setattr(plan_settings, name, broken)
    settings = "--max-tokens-per-microbatch 4096 --global-batch-size 200 --lr 1 --train-iters 3 --vocab-size 32000"
    shape = "--data-path data/megatron/mix_heavytail_mistral_v1 --num-layers 8 --hidden-size 64 --num-attention-heads 4"
    trained, shown = planners_of([*shape.split(), *settings.split(), *flags.split()], None, monkeypatch, ranks=2)
    assert trained.plan(0).digest != shown.plan(0).digest


def test_the_vocabulary_is_part_of_the_cost(lengths_file):
    def linear(*flags):
        return read_request(read_flags(["--lengths", str(lengths_file), *SIZES, *MODEL[:-2], *flags])[0]).plan_config().cost.linear

    assert linear("--vocab-size", "64000") - linear("--vocab-size", "32000") == 3 * 2 * 1024 * 32000


def test_every_setting_of_the_planner_is_a_flag_or_follows_from_flags():
    """What `PlanConfig` takes must reach it from the settings of a run: a new field needs a flag, or a rule in `planner_config`."""
    follows = {"alignment", "document_alignment", "data_parallel_size", "seed", "microbatch_multiple", "cost"}
    assert {item.name for item in dataclasses.fields(PlanConfig)} == set(AS_GIVEN) | follows
    flags = {action.dest for action in build_parser()._actions}
    assert set(AS_GIVEN) | {"seed", "data_parallel_size", "token_bucket", "cost_file"} <= flags
    unplanned = {"prefetch_steps", "data_broadcast", "check_batch_content"}
    assert {item.name for item in dataclasses.fields(DataConfig)} - flags == unplanned, "a flag of the data that the plan command passes over"


def test_flags_of_a_launch_script_are_passed_over(capsys, lengths_file):
    pasted = "--lr 1e-4 --train-iters 500 --save ckpt --eval-iters=5 --use-mcore-models --disable-bias-linear --no-tensorboard".split()
    status, out, err = plan(capsys, "--lengths", lengths_file, *SIZES, *pasted, *MODEL, "--json")
    assert status == 0 and json.loads(out)["plans"]["steps"] == 6
    assert err.strip() == "passed over, as they say nothing about plans: --lr --train-iters --save --eval-iters --tensorboard"


def test_a_flag_of_an_either_or_takes_the_place_of_the_files(capsys, lengths_file, tmp_path):
    settings = tmp_path / "run.yaml"
    settings.write_text("global_batch_size: 16\ndata_path: [nowhere]\nmax_tokens_per_microbatch: 1024\n")
    status, out, err = plan(capsys, "--config", settings, "--lengths", lengths_file, "--global-batch-tokens", 30000, "--json")
    assert status == 0, err
    assert json.loads(out)["plans"]["settings"]["global_batch_tokens"] == 30000


def test_a_blend_says_what_it_repeats(shared, capsys):
    prefix = str(shared / "data/megatron/mix_heavytail_mistral_v1")
    blend = ("--data-path", 0.9, prefix, 0.1, str(shared / "data/megatron/tiny_multimodal"))
    status, out, err = plan(capsys, *blend, "--split", "1", *SIZES, "--steps", 1, "--no-compare", "--json")
    found = json.loads(out)
    assert status == 0 and found["part"] == "training part of --split 1"
    assert re.match(r"4,0\d\d different documents", found["blend"][0]) and "1.000 passes an epoch" in found["blend"][1]
    assert float(re.search(r"([\d.]+) passes an epoch", found["blend"][2])[1]) > 1000


def test_ranks_that_idle_are_a_warning(capsys, lengths_file):
    status, out, _ = plan(capsys, "--lengths", lengths_file, *SIZES, "--data-parallel-size", 512, "--steps", 2)
    assert status == 0 and re.search(r"WARNING: \d+\.\d of 512 data-parallel ranks hold no document", out) and "Raise --global-batch-size" in out
    _, out, _ = plan(capsys, "--lengths", lengths_file, *SIZES, "--data-parallel-size", 4)
    assert "WARNING" not in out


def test_one_is_not_many(capsys, lengths_file):
    _, out, _ = plan(capsys, "--lengths", lengths_file, "--max-tokens-per-microbatch", 1024, "--global-batch-size", 1, "--steps", 1)
    assert re.search(r"step 0, B 1,024", out) and "1 step, 1 document," in out and not re.search(r"\b1 (steps|documents|microbatches)\b", out)


def test_an_output_that_cannot_be_written_is_refused_before_planning(capsys, lengths_file, monkeypatch):
    monkeypatch.setattr("megatron_dyn.training.plan_command.report_on", None)
    status, _, err = plan(capsys, "--lengths", lengths_file, *SIZES, "--output", lengths_file)
    assert status == 2 and f"--output {lengths_file} cannot be written" in err


def test_what_is_proposed_is_what_is_planned(capsys, lengths_file):
    asked = ("--lengths", lengths_file, "--recommend", "--device-memory-gib", 24, "--steps", 1, "--no-compare", "--json")
    found = json.loads(plan(capsys, *asked, *MODEL)[1])
    assert found["plans"]["settings"]["alignment"] == found["recommendation"]["token_bucket"] > 1
    assert found["plans"]["settings"]["max_tokens_per_microbatch"] == found["recommendation"]["max_tokens_per_microbatch"]
    given = json.loads(plan(capsys, *asked, *MODEL, "--token-bucket", 512)[1])
    assert given["plans"]["settings"]["alignment"] == 512 and given["recommendation"]["token_bucket"] is None
    assert [choice["token_bucket"] for choice in given["recommendation"]["buckets"]] == [512]


def test_a_tokenizer_gives_the_vocabulary(shared, capsys, lengths_file, tmp_path, monkeypatch):
    monkeypatch.chdir(shared)
    settings = tmp_path / "run.yaml"
    settings.write_text(f"num_layers: 8\nhidden_size: 1024\nnum_attention_heads: 16\nnum_query_groups: 4\ntokenizer_model: {TOKENIZER}\n")
    asked = ("--lengths", lengths_file, "--recommend", "--device-memory-gib", 24, "--steps", 1, "--no-compare", "--json")
    with_tokenizer, with_size = plan(capsys, *asked, "--config", settings), plan(capsys, *asked, *MODEL)
    assert with_tokenizer[0] == 0, with_tokenizer[2]
    assert json.loads(with_tokenizer[1])["recommendation"] == json.loads(with_size[1])["recommendation"]


def test_no_bar_of_T_stands_above_the_capacity():
    for capacity, T in ((1024, [1024, 1024, 1023, 1]), (8, [8, 8, 7, 1]), (51, [51, 1, 2])):
        counts, edges = bars_of_T(np.array(T), capacity)
        assert edges[-1] == capacity and edges[0] == 0 and counts.sum() == len(T) and len(counts) == len(edges) - 1
        for value in set(T):  # a bar holds its right edge and not its left one
            bar = np.searchsorted(edges, value, side="left") - 1
            assert counts[bar] >= T.count(value)


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
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--steps", "0"], "--steps is 0: it must be at least 1"),
        ([*SIZES, "--first-step", "-1"], "--first-step is -1"),
        ([*SIZES, "--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size is 0"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--data-parallel-size", "0"], "--data-parallel-size is 0"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--hidden-size", "64"], "missing: --num-layers"),
        (["--max-tokens-per-microbatch", "64", "--global-batch-size", "8", "--micro-batch-size", "2"], "packed up to a token budget instead"),
        ([*SIZES, "--seq-length", "4096", "--lr", "1"], "T differs from microbatch to microbatch"),
        ([*SIZES, "--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
        (["--max-tokens-per-microbatch", "0", "--global-batch-size", "8"], "--max-tokens-per-microbatch must be an integer of at least 1"),
        ([*SIZES, "--oversize", "error", "--max-tokens-per-microbatch", "9"], "--oversize error refuses them; raise --max-tokens-per-microbatch or"),
        ([*SIZES, "--token-bucket", "0"], "--token-bucket is 0"),
        (["--recommend", *MODEL, "--device-memory-gib", "inf"], "--device-memory-gib is inf"),
        (["--recommend", *MODEL, "--device-memory-gib", "nan"], "--device-memory-gib is nan"),
        (["--recommend", *MODEL[:-2], "--device-memory-gib", "80"], "--recommend needs --vocab-size or --tokenizer-model"),
        (["--recommend", *MODEL], "--recommend needs --device-memory-gib"),
        (["--recommend", *MODEL, "--device-memory-gib", "1"], "no budget of use would fit; raise --tensor-model-parallel-size"),
    ],
)
def test_refusals_name_the_way_out(capsys, lengths_file, arguments, message):
    status, out, err = plan(capsys, "--lengths", lengths_file, *arguments)
    assert status == 2 and not out and re.search(message, err), err


def test_the_planners_words_in_flags():
    said = "oversize='error' refuses them; raise max_tokens_per_microbatch or choose oversize='split', 'truncate' or 'drop'"
    assert in_flags(said) == "--oversize error refuses them; raise --max-tokens-per-microbatch or choose --oversize split, truncate or drop"
    assert in_flags("seed must be, seed=-1, drop_last drops, --seed 1, document_order='x y'") == (
        "--seed must be, --seed -1, --drop-last drops, --seed 1, --document-order x y"
    )


def test_lengths_from_files(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([3, 4], dtype=np.uint16))
    assert read_lengths(str(tmp_path / "lengths.npy")).tolist() == [3, 4]
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf3\r\n4\r\n")
    assert read_lengths(str(tmp_path / "marked.txt")).tolist() == [3, 4]
    for name, content, message in (
        ("words.txt", b"3\n\nfour\n", "line 3 is 'four'"), ("minus.txt", b"-3\n", "line 1 is '-3'"), ("long.txt", b"9" * 30, "line 1 is '999"),
        ("empty.txt", b"", "at least one"), ("damaged.npy", b"\x93NUMPY", "one length"),
        ("wide.txt", "\ufeff3\n".encode("utf-16"), "not text in UTF-8"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"--lengths .*{name}.*{message}"):
            read_lengths(str(tmp_path / name))
    np.save(tmp_path / "table.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ValueError, match="expected integers in one row"):
        read_lengths(str(tmp_path / "table.npy"))
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_lengths(str(tmp_path / "absent.txt"))


def test_the_steps_of_a_huge_epoch_are_estimated(capsys, lengths_file, monkeypatch):
    """Counting steps sized in tokens scans the epoch: a quarter of an hour for 10^9 documents."""
    flags = ("--lengths", lengths_file, "--max-tokens-per-microbatch", 1024, "--global-batch-tokens", 20000, "--json")
    counted = json.loads(plan(capsys, *flags)[1])["plans"]["corpus"]
    monkeypatch.setattr(report, "MOST_SCANNED", 10)
    estimated = json.loads(plan(capsys, *flags, "--steps", 3)[1])["plans"]["corpus"]
    assert (counted["steps_estimated"], estimated["steps_estimated"]) == (False, True)
    assert estimated["steps"] == pytest.approx(counted["steps"], rel=0.1)
    assert f"about {estimated['steps']} steps an epoch" in plan(capsys, *flags[:-1], "--steps", 3)[1]
