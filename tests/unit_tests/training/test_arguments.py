# SPDX-License-Identifier: Apache-2.0
"""Flags and YAML become one validated configuration, or one message that every rank would print alike."""

import dataclasses
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dyn.corpus import IndexedWriter
from megatron_dyn.training import arguments, launch
from megatron_dyn.training.arguments import SECTIONS, build_parser, field_docs, parse_arguments
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.inputs import Inputs
from megatron_dyn.training.launch import main

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --data-path corpus --vocab-size 100 "
    "--max-tokens-per-microbatch 512 --global-batch-size 8 --lr 1e-3 --train-iters 10"
).split()
REPOSITORY = Path(__file__).resolve().parents[3]


def parse(*more: str, world_size: int = 1):
    return parse_arguments([*MINIMAL, *more], world_size=world_size)


def without(flag: str) -> list[str]:
    at = MINIMAL.index(flag)
    return MINIMAL[:at] + MINIMAL[at + 2 :]


def test_flags_reach_their_section():
    run = parse("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--data-path", "0.7", "a", "0.3", "b", world_size=4)
    assert run.parallel.sequence_parallel and run.training.bf16 and run.precision == "bf16"
    assert run.data.data_path == ["0.7", "a", "0.3", "b"]
    assert run.parallel.data_parallel_size(4) == 2
    assert run.plan_config(data_parallel_size=2).alignment == 2


def test_every_field_of_every_section_has_a_flag_and_an_explanation():
    flags = {flag for action in build_parser()._actions for flag in action.option_strings}
    for _, cls in SECTIONS.values():
        docs = field_docs(cls)
        for item in dataclasses.fields(cls):
            assert "--" + item.name.replace("_", "-") in flags
            assert docs.get(item.name), f"{cls.__name__}.{item.name} has no explanation"


def test_no_two_sections_share_a_name():
    names = [item.name for _, cls in SECTIONS.values() for item in dataclasses.fields(cls)]
    assert len(names) == len(set(names)), "a flag would set two fields"


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_layers: 4\n  hidden-size: 32\nlr: 1e-4\nadam_beta2: 0.95\nbf16: true\n")
    run = parse_arguments(["--config", str(file), *without("--num-layers"), "--no-bf16"], world_size=1)
    assert run.model.num_layers == 4, "from YAML"
    assert run.model.hidden_size == 64, "the flag wins"
    assert run.optimizer.lr == 1e-3 and run.optimizer.adam_beta2 == 0.95 and run.optimizer.adam_beta1 == 0.9
    assert run.training.bf16 is False


@pytest.mark.parametrize(
    "text, flags, taken",
    [
        ("global_batch_size: 16", ["--global-batch-tokens", "3000"], ("data.global_batch_tokens", 3000, "data.global_batch_size")),
        ("global_batch_tokens: 16", ["--global-batch-size", "3"], ("data.global_batch_size", 3, "data.global_batch_tokens")),
        ("lr_warmup_iters: 2", ["--lr-warmup-fraction", "0.5"], ("optimizer.lr_warmup_fraction", 0.5, None)),
        ("lr_warmup_fraction: 0.1", ["--lr-warmup-iters", "2"], ("optimizer.lr_warmup_iters", 2, "optimizer.lr_warmup_fraction")),
    ],
)
def test_a_flag_of_an_either_or_takes_the_place_of_the_files_other_half(tmp_path, text, flags, taken):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    batch = [] if "batch" in text else ["--global-batch-size", "8"]
    run = parse_arguments(["--config", str(file), *without("--global-batch-size"), *batch, *flags], world_size=1)
    name, value, other = taken
    assert operator.attrgetter(name)(run) == value and (other is None or operator.attrgetter(other)(run) is None)
    file.write_text("global_batch_size: 16\nglobal_batch_tokens: 100\n")
    with pytest.raises(ConfigError, match="not both"):
        parse_arguments(["--config", str(file), *without("--global-batch-size")], world_size=1)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("num_layer: 4", "unknown setting 'num_layer'.*did you mean 'num_layers'"),
        ("model:\n  lr: 1.0", "unknown setting 'lr' in section 'model'"),
        ("num_layers: four", "num_layers is 'four'; expected int"),
        ("num_layers: 2.5", "expected int"),
        ("bf16: yep", "bf16 is 'yep'; expected bool"),
        ("oversize: cut", "expected one of split, truncate, drop, error"),
        ("lr: 1.0\noptimizer:\n  lr: 2.0", "set twice"),
        ("seq_length: 4096", "max-tokens-per-microbatch"),
        ("- a\n- b", "holds a list"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_yaml_file_is_refused(tmp_path, text, complaint):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        parse("--config", str(file))


def test_a_missing_yaml_file_is_refused():
    with pytest.raises(ConfigError, match="nowhere.yaml cannot be read"):
        parse("--config", "nowhere.yaml")


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--nonsense", "1"], "unrecognized arguments: --nonsense"),
        (["--num-layer", "4"], "unrecognized"),
        (["--num-layers", "two"], "invalid int value"),
        (["--micro-batch-size", "1"], "--max-tokens-per-microbatch"),
        (["--fp16"], "--bf16"),
        (["--context-parallel-size", "2"], "context parallelism is not supported"),
        (["--global-batch-tokens", "4096"], "exactly one of --global-batch-size.*not both"),
        (["--max-tokens-per-microbatch", "0"], "--max-tokens-per-microbatch must be an integer of at least 1"),
        (["--overlap-param-gather"], "--use-distributed-optimizer"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], "at least two pipeline ranks"),
        (["--lr-warmup-iters", "10"], "warmup of 10 steps leaves nothing"),
        (["--lr-warmup-iters", "1", "--lr-warmup-fraction", "0.1"], "contradict"),
        (["--lr-decay-style", "WSD"], "--lr-wsd-decay-iters"),
        (["--min-lr", "1"], "--min-lr"),
        (["--save-interval", "5"], "--save-interval without --save"),
        (["--num-query-groups", "3"], "query groups"),
        (["--train-iters", "0"], "at least 1"),
        (["--adam-beta1", "1.5"], "--adam-beta1 is 1.5"),
        (["--adam-eps", "-1"], "--adam-eps"),
        (["--lr-warmup-fraction", "-0.1"], "--lr-warmup-fraction"),
        (["--lr-decay-iters", "0"], "--lr-decay-iters is 0"),
        (["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "99"], "do not fit into the 10 steps"),
        (["--optimizer", "sgd", "--use-distributed-optimizer"], "distributes Adam only"),
        (["--documents-per-microbatch", "4"], "4 with --microbatching dynamic: it would change nothing; give --microbatching fixed-count"),
        (["--length-window", "100"], "100 with --document-order shuffle: it would change nothing; give --document-order length-window"),
        (["--measure-pipeline-bubble"], "without a pipeline: .* nothing would be measured; give --pipeline-model-parallel-size 2"),
    ],
)
def test_wrong_or_contradictory_flags_are_refused(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(*flags)


@pytest.mark.parametrize("flag", ["--num-layers", "--data-path", "--vocab-size", "--max-tokens-per-microbatch", "--global-batch-size", "--lr", "--train-iters"])
def test_what_is_needed_is_asked_for(flag):
    with pytest.raises(ConfigError, match=flag):
        parse_arguments(without(flag), world_size=1)


def test_ranks_that_hold_no_whole_model_are_refused():
    with pytest.raises(ConfigError, match="a world of 3 cannot hold whole copies"):
        parse("--tensor-model-parallel-size", "2", world_size=3)


def test_megatron_launch_scripts_keep_their_spelling():
    run = parse("--disable-bias-linear", "--use-mcore-models", "--use-rotary-position-embeddings", "--accumulate-allreduce-grads-in-fp32")
    assert run.model.add_bias_linear is False and run.model.position_embedding_type == "rope"


def test_every_refused_flag_is_refused_with_its_way_out():
    for name, way_out in arguments.REFUSED.items():
        with pytest.raises(ConfigError) as refusal:
            parse("--" + name.replace("_", "-"))
        assert way_out in str(refusal.value)


def test_all_ranks_print_the_same_refusal_before_any_process_group():
    """No rendezvous exists here: a rank that tried to make a process group would hang."""
    command = [sys.executable, "pretrain_gpt_thd.py", *MINIMAL, "--data-path", "does/not/exist"]
    texts = []
    for rank in range(2):
        environment = os.environ | {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
        ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        texts.append(ended.stderr)
    assert texts[0] == texts[1]
    assert "does/not/exist" in texts[0] and "Traceback" not in texts[0]


@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, flag, capsys):
    (tmp_path / "file").write_text("in the way")
    assert main([*MINIMAL, flag, str(tmp_path / "file" / "run")]) == 2
    assert f"{flag} {tmp_path}/file/run cannot be written (" in capsys.readouterr().err


@pytest.mark.parametrize("engine, complaint", [(None, r"megatron-dyn\[te\]"), (object(), "give --bf16")], ids=["no engine", "fp32"])
def test_what_a_gpu_cannot_run_is_refused_before_anything_starts(monkeypatch, capsys, engine, complaint):
    monkeypatch.setattr(launch.device, "has_gpu", lambda: True)
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: engine)
    assert main(MINIMAL) == 2
    assert re.search(complaint, capsys.readouterr().err)


def test_the_page_of_flags_is_up_to_date():
    page = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == arguments.flags_page(), "write it again: python -m megatron_dyn flags > docs/flags.md"


@pytest.mark.parametrize(
    "flags, complaint",
    [(["--split", "0,100"], "leaves no document to train on"), (["--distributed-backend", "nccl"], "'nccl' needs CUDA")],
)
def test_what_the_documents_and_the_machine_rule_out_is_refused_too(tmp_path, flags, complaint, capsys):
    with IndexedWriter(tmp_path / "corpus", vocab_size=100) as writer:
        for _ in range(4):
            writer.add_document([5, 6, 7])
    assert main([*MINIMAL, "--data-path", str(tmp_path / "corpus"), *flags]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, table, refused",
    [
        ([], 7, False),  # documents of 7 tokens in microbatches of 512: positions restart in each
        ([], 6, True),
        (["--max-sum-squares-per-microbatch", "36"], 6, False),  # pieces of 6 tokens at most
        (["--microbatching", "pad-to-max"], 7, False),
        (["--microbatching", "concat-chunk"], 7, True),  # positions run on to B
        (["--microbatching", "concat-chunk"], 512, False),
    ],
)
def test_learned_positions_must_reach_the_longest_piece_and_no_further(tmp_path, flags, table, refused):
    with IndexedWriter(tmp_path / "corpus", vocab_size=100) as writer:
        for _ in range(8):
            writer.add_document([5, 6, 7, 8, 9, 10, 11])
    learned = ["--position-embedding-type", "learned_absolute", "--max-position-embeddings", str(table)]
    run = parse_arguments([*MINIMAL, "--split", "50,50", "--data-path", str(tmp_path / "corpus"), *learned, *flags], world_size=1)
    if not refused:
        Inputs(run)
        return
    with pytest.raises(ConfigError, match="run past the table.* cut pieces shorter with ") as caught:
        Inputs(run)
    way_out = str(caught.value).rsplit("cut pieces shorter with ")[1].split()
    Inputs(parse_arguments([*MINIMAL, "--split", "50,50", "--data-path", str(tmp_path / "corpus"), *learned, *flags, *way_out], world_size=1))


@pytest.mark.parametrize("cap, root", [([], 512), (["--max-sum-squares-per-microbatch", "49"], 7)])
@pytest.mark.parametrize("lengths, validation", [((700, 7), False), ((7, 700), True)])
def test_what_the_planner_refuses_is_said_in_flags(tmp_path, cap, root, lengths, validation, capsys):
    with IndexedWriter(tmp_path / "corpus", vocab_size=100) as writer:
        for length in lengths:
            writer.add_document([5] * length)
    path = ["--data-path", str(tmp_path / "corpus"), "--split", "50,50"]
    assert main([*MINIMAL, *path, *cap, "--oversize", "error"]) == 2
    found = " ".join(capsys.readouterr().err.split())
    raised = cap[0] if cap else "--max-tokens-per-microbatch"
    assert f"--oversize error refuses them; raise {raised} or choose --oversize split, truncate or drop" in found and f"{root} tokens" in found
    assert ("the validation documents (--split 50,50) cannot be planned: " in found) == validation
    assert not re.search(r"oversize=|max_\w+_per_microbatch", found)


def test_tasks_of_slurm_without_torchrun_are_refused(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert main(MINIMAL) == 2
    assert "srun started 2 tasks and no torchrun" in capsys.readouterr().err
