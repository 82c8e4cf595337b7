# SPDX-License-Identifier: Apache-2.0
"""ThdAttention against a naive fp64 attention, one document at a time: exactness, no leaks, padding, dropout, refusals."""

import copy

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from packed_attention_checks import (
    CHANNELS,
    GROUPS,
    HEADS,
    MANY_TINY,
    PACKS,
    Pack,
    assert_equals_naive,
    make_attention,
    naive,
    pack,
    random_inputs,
    results,
)

from megatron_dyn import device
from megatron_dyn.layers import ThdAttention, attention, layout


@pytest.fixture
def seeded(monkeypatch):
    """Seeds Megatron's tracker as the given tensor-parallel rank would, on a machine without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.install_cpu_replacements()
    generator = torch.get_rng_state()

    def seed(tp_rank: int = 0) -> None:
        model_parallel_cuda_manual_seed(3, tp_rank=tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True)

    yield seed
    torch.set_rng_state(generator)
    device.uninstall_cpu_replacements()


@pytest.mark.parametrize("name", PACKS)
def test_equals_naive_attention(name):
    assert_equals_naive(PACKS[name])


@pytest.mark.parametrize("name", PACKS)
def test_bf16_is_as_good_as_bf16_can_be(name):
    assert_equals_naive(PACKS[name], dtype=torch.bfloat16, tolerance=1e-2)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 1), (6, 3), (1, 1)])
def test_grouped_queries(heads, groups):
    assert_equals_naive(PACKS["long and tiny"], heads=heads, groups=groups)


def test_both_ways_of_laying_out_rows_are_tried():
    kinds = {layout.build_layout(p.params(), p.T, HEADS * CHANNELS).sorting is None for p in PACKS.values()}
    assert kinds == {True, False}


def test_random_packs(monkeypatch):
    """Any lengths, any padding, any weighing of calls against rows."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    for _ in range(40):
        monkeypatch.setattr(layout, "CALL_NUMBERS", 10 ** draw(0, 6))
        count = draw(1, 20)
        lengths = tuple(draw(0, 12) for _ in range(count - 1)) + (draw(1, 30),)
        assert_equals_naive(Pack(lengths=lengths, padding=tuple(draw(0, 3) for _ in range(count))))


@pytest.mark.parametrize("name", ["case 10", "many tiny"])
def test_softmax_scale_is_taken(name):
    qkv, grad = random_inputs(PACKS[name].T)
    found = results(make_attention(softmax_scale=0.7), PACKS[name], qkv, grad)
    for a, b in zip(found, naive(PACKS[name], qkv, grad, scale=0.7)):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


def test_layer_scaling_does_not_change_the_result():
    """Megatron's own attention divides the scores by the layer number and multiplies it back within the softmax."""
    qkv, grad = random_inputs(8)
    plain, scaled = make_attention(), make_attention(apply_query_key_layer_scaling=True)
    assert all(torch.equal(a, b) for a, b in zip(results(plain, pack(8), qkv, grad), results(scaled, pack(8), qkv, grad)))


@pytest.mark.parametrize("lengths", [(8, 8), (8, 3, 8), (4,) * 40])
def test_identical_documents_have_identical_outputs(lengths):
    (query, key, value), grad = random_inputs(sum(lengths))
    starts = pack(*lengths).starts
    first, last = slice(0, lengths[0]), slice(starts[-1], starts[-1] + lengths[-1])
    with torch.no_grad():
        for x in (query, key, value, grad):
            x[last] = x[first]
    for found in results(make_attention(), pack(*lengths), [query, key, value], grad):
        torch.testing.assert_close(found[last], found[first], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["case 10", "many tiny", "long and tiny", "each padded"])
@pytest.mark.parametrize("change", [5.0, float("nan")])
def test_nothing_leaks_into_another_document(name, change):
    """Not even a NaN, nor into gradients."""
    tried = PACKS[name]
    victim = len(tried.lengths) // 2
    rows = torch.zeros(tried.T, dtype=torch.bool)
    rows[tried.starts[victim] : tried.starts[victim] + tried.lengths[victim]] = True
    qkv, grad = random_inputs(tried.T)
    before = results(make_attention(), tried, qkv, grad)
    with torch.no_grad():
        for x in qkv:
            x[rows] += change
    after = results(make_attention(), tried, qkv, grad)
    for a, b in zip(before, after):
        assert torch.equal(a[~rows], b[~rows])
    assert not torch.equal(before[0][rows], after[0][rows])  # the change was seen where it was made


@pytest.mark.parametrize("name", ["one token, padded", "case 3", "many tiny", "each padded", "many tiny, each padded"])
def test_padding_is_inert(name):
    tried = PACKS[name]
    is_padding = torch.ones(tried.T, dtype=torch.bool)
    for start, length in zip(tried.starts, tried.lengths):
        is_padding[start : start + length] = False
    qkv, grad = random_inputs(tried.T)
    before = results(make_attention(), tried, qkv, grad)
    with torch.no_grad():
        for x in (*qkv, grad):
            x[is_padding] = float("nan")
    for a, b in zip(before, results(make_attention(), tried, qkv, grad)):
        assert torch.equal(a, b)
        assert (b[is_padding] == 0).all()


def test_microbatches_may_be_interleaved():
    """1F1B runs one forward between another's forward and backward; what depends on T belongs to the microbatch."""
    module, expected, running = make_attention(), [], []
    for name in ("case 10", "many tiny"):
        qkv, grad = random_inputs(PACKS[name].T)
        expected.append(results(module, PACKS[name], qkv, grad)[1:])
        running.append((qkv, grad, module(*qkv, None, packed_seq_params=PACKS[name].params())))
    for (qkv, grad, output), gradients in zip(running, expected):
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(output, qkv, grad), gradients))


# --- mutants: the checks above notice what they are for ----------------------------------------------------------------


def test_mutant_ignoring_cu_seqlens_is_caught(monkeypatch):
    real = layout._arrange
    monkeypatch.setattr(layout, "_arrange", lambda cu, T, starts, lengths, width: real(cu, T, [0], [T], width))
    assert_equals_naive(PACKS["one document"])  # a single document is no test
    with pytest.raises(AssertionError, match="output is"):
        assert_equals_naive(PACKS["case 10"])


def test_mutant_seeing_the_future_is_caught(monkeypatch):
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda *a, is_causal, **k: real(*a, **k))
    with pytest.raises(AssertionError, match="output is"):
        assert_equals_naive(PACKS["case 10"])


def test_mutant_losing_rows_on_the_way_back_is_caught(monkeypatch):
    real = attention._take
    monkeypatch.setattr(attention, "_take", lambda rows, index, blank: real(rows, index.flip(0), blank))
    with pytest.raises(AssertionError, match="is .* off"):
        assert_equals_naive(PACKS["many tiny"])


# --- dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1,) * 400, MANY_TINY])
def test_dropout_drops_its_share_and_leaves_the_generators_in_order(seeded, lengths):
    """Values of 1 make an output the sum of the kept probabilities."""
    seeded()
    p, tried, module = 0.25, pack(*lengths), make_attention(dropout=0.25)
    (query, key, _), _ = random_inputs(tried.T)
    value = torch.ones(tried.T, GROUPS, CHANNELS)
    before = torch.get_rng_state()
    output = module(query, key, value, None, packed_seq_params=tried.params())
    assert torch.equal(torch.get_rng_state(), before)
    per_head = output.view(tried.T, HEADS, CHANNELS)[..., 0].detach()
    draws = per_head.numel()
    assert abs(per_head.mean() - 1) < 5 * (p / (1 - p) / draws) ** 0.5
    if set(lengths) == {1}:  # each output is one draw
        assert abs((per_head == 0).float().mean() - p) < 5 * (p * (1 - p) / draws) ** 0.5
        assert torch.allclose(per_head[per_head != 0], torch.tensor(1 / (1 - p)))
    again = module(query, key, value, None, packed_seq_params=tried.params())
    assert not torch.equal(again, output)  # the tracker's state went on
    module.eval()
    assert torch.allclose(module(query, key, value, None, packed_seq_params=tried.params()), torch.ones_like(output))


def test_tensor_parallel_ranks_drop_different_entries(seeded):
    qkv, _ = random_inputs(8)
    outputs = []
    for tp_rank in (0, 1):
        seeded(tp_rank)
        outputs.append(make_attention(dropout=0.5)(*qkv, None, packed_seq_params=pack(8).params()))
    assert not torch.equal(*outputs)


def test_under_sequence_parallelism_the_block_has_chosen_the_generator(seeded):
    """Megatron forks once around the block then; a fork inside a fork of the same name would restart the sequence."""
    seeded()
    qkv, _ = random_inputs(8)
    module = make_attention(dropout=0.5, sequence_parallel=True)
    tracker = get_cuda_rng_tracker()
    own = tracker.get_states()["model-parallel-rng"].clone()
    module(*qkv, None, packed_seq_params=pack(8).params())
    assert torch.equal(tracker.get_states()["model-parallel-rng"], own)


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_missing_packing_is_refused():
    qkv, _ = random_inputs(8)
    with pytest.raises(ValueError, match="would let documents see each other"):
        make_attention()(*qkv, None)
    wrong = pack(8).params()
    wrong.qkv_format = "sbhd"
    with pytest.raises(ValueError, match="would let documents see each other"):
        make_attention()(*qkv, None, packed_seq_params=wrong)


@pytest.mark.parametrize("extra", [dict(attention_mask=torch.ones(8, 8)), dict(attention_mask=None, attention_bias=torch.ones(8, 8))])
def test_a_mask_beside_the_pieces_is_refused(extra):
    qkv, _ = random_inputs(8)
    with pytest.raises(ValueError, match="neither attention_mask nor attention_bias"):
        make_attention()(*qkv, packed_seq_params=pack(8).params(), **extra)


@pytest.mark.parametrize(
    "settings, kinds, named",
    [
        (dict(context_parallel_size=2), {}, "context_parallel_size 2"),
        (dict(window_size=(128, 0)), {}, "window_size"),
        (dict(softmax_type="learnable"), {}, "softmax_type 'learnable'"),
        ({}, dict(attention_type="cross"), "attention type 'cross'"),
        ({}, dict(attn_mask_type=AttnMaskType.no_mask), "mask type"),
    ],
)
def test_what_it_cannot_do_is_refused_when_the_model_is_built(settings, kinds, named):
    config = copy.copy(make_attention().config)
    vars(config).update(settings)
    with pytest.raises(ValueError, match=named.replace("(", r"\(")):
        ThdAttention(config, 1, **(dict(attn_mask_type=AttnMaskType.causal, attention_type="self") | kinds))
