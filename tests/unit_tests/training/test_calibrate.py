# SPDX-License-Identifier: Apache-2.0
"""The fit of measured costs, the file it is kept in, and the plan that follows from it."""

import random
from pathlib import Path

import pytest

from megatron_dyn.planning import CostModel
from megatron_dyn.planning.cost_file import doubts, read_cost_file, write_cost_file
from megatron_dyn.training import calibrate
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.calibrate import SHORTEST_DOCUMENT, fit, main, mixes
from megatron_dyn.training.config import ConfigError

FLAGS = (
    "--vocab-size 61 --num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-tokens-per-microbatch 256 --global-batch-size 4 --lr 1e-3 "
    "--train-iters 1"
).split()


def sums(mix):
    return sum(mix), sum(length * length for length in mix)


def test_the_mixes_fill_three_sizes_of_T_with_one_to_many_documents():
    found = mixes(4096)
    assert {sum(mix) for mix in found} == {4096, 2048, 1024}
    assert {len(mix) for mix in found} == {1, 2, 4, 16, 64}
    assert all(min(mix) >= SHORTEST_DOCUMENT for budget in (256, 1000, 4096) for mix in mixes(budget))
    assert all(sum(mix) <= 1000 for mix in mixes(1000))


@pytest.mark.parametrize("wanted", [(3e-3, 2e-6, 5e-11), (0.0, 2e-6, 5e-11), (3e-3, 2e-6, 0.0), (0.0, 2e-6, 0.0)])
def test_exact_times_give_back_their_coefficients(wanted):
    tokens, squares = zip(*map(sums, mixes(8192)))
    seconds = [wanted[0] + wanted[1] * t + wanted[2] * s for t, s in zip(tokens, squares)]
    found = fit(tokens, squares, seconds)
    assert (found.constant, found.linear, found.quadratic) == pytest.approx(wanted, rel=1e-6, abs=1e-18)
    assert found.worst_error < 1e-9


def test_noise_and_cheap_attention_never_make_a_coefficient_negative():
    draw = random.Random(3)
    tokens, squares = zip(*map(sums, mixes(2048)))
    for _ in range(50):
        seconds = [(1e-3 + 1e-6 * t - 1e-11 * s) * draw.uniform(0.9, 1.1) for t, s in zip(tokens, squares)]
        found = fit(tokens, squares, seconds)
        assert min(found.constant, found.linear, found.quadratic) >= 0
        assert found.worst_error < 0.25


def test_too_few_different_microbatches_are_refused():
    with pytest.raises(ValueError, match="at least three different"):
        fit([10, 10, 20], [100, 100, 400], [1.0, 1.0, 2.0])


def test_the_file_keeps_every_bit(tmp_path):
    cost = CostModel(linear=1 / 3e7, quadratic=1 / 7e12)
    write_cost_file(tmp_path / "cost.yaml", cost, device="a card", constant=1e-3)
    assert read_cost_file(tmp_path / "cost.yaml") == cost


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "cannot be read"),
        ("linear: 1", "must hold linear and quadratic"),
        ("[1, 2]", "must hold linear and quadratic"),
        ("linear: 1\nquadratic: 1\nquadric: 2", "must hold linear and quadratic"),
        ("linear: -1\nquadratic: 1", "at least 0"),
        ("linear: much\nquadratic: 1", "could not convert"),
        ("linear: [", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_the_run(tmp_path, text, says):
    path = tmp_path / "cost.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"--cost-file.*{says}"):
        parse_arguments([*FLAGS, "--data-path", "none", "--cost-file", str(path)], world_size=1)


def test_a_measured_cost_takes_the_place_of_the_counted_one_in_the_plan(tmp_path):
    write_cost_file(tmp_path / "cost.yaml", CostModel(linear=2.0, quadratic=0.5))
    run = parse_arguments([*FLAGS, "--data-path", "none", "--cost-file", str(tmp_path / "cost.yaml")], world_size=1)
    assert run.plan_config(data_parallel_size=1).cost == CostModel(linear=2.0, quadratic=0.5)
    assert run.cost_model(61) == CostModel(linear=2.0, quadratic=0.5)  # the digest of every plan covers it


def test_the_command_measures_the_model_of_the_run(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # A busy machine can make any times of a tiny model: the measurements themselves are not what is tested here.
    rates = dict(constant=1e-3, linear=1e-5, quadratic=1e-8)
    real = calibrate.measure

    def measured(stepper, microbatches, *, rounds):
        assert min(real(stepper, microbatches, rounds=rounds)) > 0
        sums = [(m.tokens.numel(), (m.packed_seq_params.cu_seqlens_q.diff().double() ** 2).sum().item()) for m in microbatches]
        return [rates["constant"] + rates["linear"] * tokens + rates["quadratic"] * squares for tokens, squares in sums]

    monkeypatch.setattr(calibrate, "measure", measured)
    assert run_alone([*FLAGS, "--rounds", "1", "--output", str(tmp_path / "cost.yaml")], tmp_path) == 0
    cost = read_cost_file(tmp_path / "cost.yaml")
    assert (cost.linear, cost.quadratic) == pytest.approx((rates["linear"], rates["quadratic"]), rel=1e-3)


def test_times_that_do_not_grow_with_the_tokens_are_refused(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(calibrate, "measure", lambda stepper, microbatches, **_: [1e-3] * len(microbatches))
    assert run_alone([*FLAGS, "--rounds", "1", "--output", str(tmp_path / "cost.yaml")], tmp_path) != 0
    assert "do not grow with the tokens" in capfd.readouterr().err and not (tmp_path / "cost.yaml").exists()


def run_alone(argv, folder: Path) -> int:
    """The command in a process of its own: it makes process groups and Megatron's parallel state."""
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=lambda: raise_status(main(argv)))
    process.start()
    process.join(60)
    return process.exitcode


def raise_status(status: int) -> None:
    raise SystemExit(status)


def test_times_that_explain_nothing_are_not_written(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(calibrate, "measure", lambda stepper, microbatches, **_: [1e-5 * m.tokens.numel() * (1 + 9 * (i % 3 == 1)) for i, m in enumerate(microbatches)])
    assert run_alone([*FLAGS, "--rounds", "1", "--output", str(tmp_path / "cost.yaml")], tmp_path) != 0
    assert "do not follow from tokens and attention" in capfd.readouterr().err and not (tmp_path / "cost.yaml").exists()


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ConfigError, match="is no folder that can be written"):
        main([*FLAGS, "--output", str(tmp_path / "nowhere" / "cost.yaml")])


def test_a_file_of_another_model_or_a_poor_fit_is_doubted(tmp_path):
    path = tmp_path / "cost.yaml"
    model = dict(num_layers=1, hidden_size=32)
    write_cost_file(path, CostModel(), model=model, fit={"worst_relative_error": 0.05})
    assert doubts(path, model) == [] and doubts(path, {}) == []
    [other] = doubts(path, model | {"hidden_size": 64})
    assert "another model: hidden_size 32 (here 64)" in other
    write_cost_file(path, CostModel(), fit={"worst_relative_error": 0.4})
    assert "worst error 40%" in doubts(path, model)[0]
    path.write_text("linear: 1\nquadratic: 2\n")
    assert doubts(path, model) == []
