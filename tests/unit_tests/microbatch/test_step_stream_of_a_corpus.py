# SPDX-License-Identifier: Apache-2.0
"""Files, planner, sampler and stream together: what comes out of the stream is what lies in the files."""

import json
import multiprocessing
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch_checks import check_microbatch

from megatron_dyn.corpus import IndexedWriter, open_corpus
from megatron_dyn.microbatch import StepStream
from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler

HEAVY_TAIL = [3, 1, 40, 0, 7, 2, 2, 19, 1, 0, 5, 11, 4, 90, 6, 1, 8]


def random_documents(lengths, seed=7):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 500, length).tolist() for length in lengths]


def written(folder, documents):
    with IndexedWriter(folder / "c", vocab_size=500) as writer:
        for document in documents:
            writer.add_document(document)
    return open_corpus([str(folder / "c")], split="100", vocab_size=500).train


@pytest.fixture(scope="module")
def documents():
    return random_documents(HEAVY_TAIL)


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory):
    return written(tmp_path_factory.mktemp("corpus"), documents)


def sampler_of(corpus, rank=0, num_epochs=1, **config):
    config = {"max_tokens_per_microbatch": 16, "global_batch_size": 4, "alignment": 4, **config}
    return TokenBudgetBatchSampler(Planner(corpus.lengths, PlanConfig(**config), corpus.fingerprint), rank, num_epochs)


def stream_of(corpus, state=None, rank=0, prefetch_steps=2, num_epochs=1, **config):
    sampler = sampler_of(corpus, rank, num_epochs, **config)
    if state is not None:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return StepStream(sampler, corpus, data_parallel_rank=rank, device="cpu", prefetch_steps=prefetch_steps)


def pairs_of(microbatches):
    """(document, place, token, label) of every loss token."""
    found = []
    for mb in microbatches:
        for piece, row in zip(mb.plan.pieces, mb.packed_seq_params.cu_seqlens_q_padded.tolist()):
            for offset in range(piece.length):
                if mb.loss_mask[0, row + offset]:
                    found.append((piece.document, piece.start + offset, mb.tokens[0, row + offset].item(), mb.labels[0, row + offset].item()))
    return found


def all_pairs(documents):
    return sorted((d, i, a, b) for d, document in enumerate(documents) for i, (a, b) in enumerate(zip(document, document[1:])))


def epoch_of_pairs(corpus, documents, data_parallel_size, **config):
    pairs = []
    for rank in range(data_parallel_size):
        with stream_of(corpus, rank=rank, data_parallel_size=data_parallel_size, **config) as stream:
            for plan, microbatches in stream:
                assert len(microbatches) == plan.num_microbatches
                for mb in microbatches:
                    check_microbatch(mb, documents)
                pairs += pairs_of(microbatches)
    return sorted(pairs)


@pytest.mark.parametrize("data_parallel_size", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 16, 64, 1024])
def test_an_epoch_trains_every_loss_token_once(corpus, documents, data_parallel_size, budget):
    """Rows 12, 21 and 31, cut documents and fillers included; whatever the budget and the ranks."""
    assert epoch_of_pairs(corpus, documents, data_parallel_size, max_tokens_per_microbatch=budget) == all_pairs(documents)


@pytest.mark.parametrize("oversize, document_alignment", [("truncate", 1), ("drop", 1), ("split", 4)])
def test_policies_and_document_alignment_build(corpus, documents, oversize, document_alignment):
    """A truncated document's last kept token has a label, as the plan counts it; a dropped one has none at all."""
    kept = {
        "split": all_pairs(documents),
        "drop": [p for p in all_pairs(documents) if len(documents[p[0]]) <= 16],
        "truncate": [p for p in all_pairs(documents) if p[1] < 16],
    }[oversize]
    assert epoch_of_pairs(corpus, documents, 2, oversize=oversize, document_alignment=document_alignment) == kept


def test_every_step_is_the_same_set_of_loss_tokens_under_any_budget(corpus):
    def steps(**config):
        with stream_of(corpus, **config) as stream:
            return [sorted(pairs_of(microbatches)) for _, microbatches in stream]

    assert steps(max_tokens_per_microbatch=8) == steps(max_tokens_per_microbatch=64) == steps(max_documents_per_microbatch=1, max_tokens_per_microbatch=96)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("resumed_depth", [0, 2])
def test_row_25(tmp_path, depth, resumed_depth):
    """B=8, no shuffle, lens [5,5,3,8,2]: saved after document 0 while more has been read, the rest is 1, 2, 3, 4."""
    corpus = written(tmp_path, random_documents([5, 5, 3, 8, 2]))
    config = {"max_tokens_per_microbatch": 8, "global_batch_size": 1, "alignment": 1, "document_order": "sequential"}

    def ids(steps):
        return [piece.document for _, microbatches in steps for mb in microbatches for piece in mb.plan.pieces]

    with stream_of(corpus, prefetch_steps=depth, **config) as stream:
        assert ids([stream.next()]) == [0]
        state = stream.state_dict()
    assert state["step"] == 1 and state["totals"]["documents"] == 1
    with stream_of(corpus, state, prefetch_steps=resumed_depth, **config) as stream:
        assert ids(stream) == [1, 2, 3, 4]


@pytest.mark.parametrize("saved_after", [1, 4, 5, 8, 11])
def test_resuming_over_epochs_is_invisible(corpus, saved_after):
    """Row 27 through the stream: four steps an epoch, saved within, at the end of and at the start of epochs."""

    def run(stream, steps=None):
        out = []
        for plan, microbatches in stream:
            out.append((plan.digest, [mb.tokens.tolist() for mb in microbatches]))
            if len(out) == steps:
                break
        return out

    with stream_of(corpus, num_epochs=3) as stream:
        unbroken = run(stream)
    with stream_of(corpus, num_epochs=3) as stream:
        first = run(stream, saved_after)
        state = stream.state_dict()
    for depth in (0, 3):
        with stream_of(corpus, state, num_epochs=3, prefetch_steps=depth) as stream:
            assert first + run(stream) == unbroken
            assert stream.state_dict() == final_state(corpus)


def final_state(corpus):
    sampler = sampler_of(corpus, num_epochs=3)
    for _ in sampler:
        pass
    return sampler.state_dict()


def test_resuming_on_another_number_of_ranks_goes_on_with_the_same_documents(corpus, documents):
    with stream_of(corpus) as stream:
        seen = pairs_of(stream.next()[1]) + pairs_of(stream.next()[1])
        state = stream.state_dict()
    for rank in range(2):
        with stream_of(corpus, state, rank=rank, data_parallel_size=2) as stream:
            for _, microbatches in stream:
                seen += pairs_of(microbatches)
    assert sorted(seen) == all_pairs(documents)


def test_planning_and_building_draw_no_global_random_number_and_make_no_process(corpus):
    """Row 28, with everything real; and row 34: there is no worker process that could be killed."""
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    with stream_of(corpus, num_epochs=2) as stream:
        for _ in stream:
            assert multiprocessing.active_children() == []
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any),
    budget=st.integers(1, 40),
    alignment=st.sampled_from([1, 2, 4, 8]),
    batch=st.integers(1, 8),
    ranks=st.integers(1, 3),
    multiple=st.integers(1, 2),
)
def test_any_corpus_comes_out_whole(tmp_path_factory, lengths, budget, alignment, batch, ranks, multiple):
    documents = random_documents(lengths)
    corpus = written(tmp_path_factory.mktemp("any"), documents)
    config = {"max_tokens_per_microbatch": budget, "alignment": alignment, "global_batch_size": batch, "microbatch_multiple": multiple}
    assert epoch_of_pairs(corpus, documents, ranks, prefetch_steps=0, **config) == all_pairs(documents)


def test_the_heavy_tailed_corpus_builds_with_its_book(shared):
    """Real text: a book of 68,651 tokens and its end-of-document token, cut in nine pieces at B = 8192."""
    corpus = open_corpus([str(shared / "data/megatron/mix_heavytail_mistral_v1")], split="100", vocab_size=32000).train
    book = int(np.argmax(corpus.lengths))
    assert corpus.lengths[book] == 68652
    config = {"max_tokens_per_microbatch": 8192, "global_batch_size": 32, "alignment": 2}
    covered, loss_tokens, pieces = Counter(), 0, []
    with stream_of(corpus, **config) as stream:
        for _, microbatches in stream:
            for mb in microbatches:
                assert mb.T % 2 == 0 and mb.T <= 8192
                assert 0 <= mb.tokens.min() and mb.tokens.max() < 32000
                loss_tokens += int(mb.loss_mask.sum())
                for piece, row in zip(mb.plan.pieces, mb.packed_seq_params.cu_seqlens_q_padded.tolist()):
                    covered[piece.document] += piece.length
                    if piece.document == book:
                        pieces.append((piece.start, mb.tokens[0, row : row + piece.length]))
    assert covered == Counter({d: int(n) for d, n in enumerate(corpus.lengths) if n})
    assert loss_tokens == int((corpus.lengths - 1).clip(0).sum())
    assert len(pieces) == 9
    assert np.array_equal(torch.cat([ids for _, ids in sorted(pieces, key=lambda piece: piece[0])]).numpy(), corpus.tokens(book, 0, 68652))
