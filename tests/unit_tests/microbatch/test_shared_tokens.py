# SPDX-License-Identifier: Apache-2.0
"""What a peer builds from received ids is what the reading rank built, and a message that does not fit the plan is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from microbatch_checks import ListCorpus, check_microbatch, hand_plan

from megatron_dyn.microbatch import MicrobatchError, build_microbatch
from megatron_dyn.microbatch.builder import segment_sizes
from megatron_dyn.microbatch.packed import content_checksum
from megatron_dyn.microbatch.shared_tokens import TokenBroadcast, _ids_of
from megatron_dyn.planning import PlanConfig, Planner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "functional_tests"))
from launch import launch  # noqa: E402

DOCUMENTS = [[10 * d + i for i in range(n)] for d, n in enumerate([5, 1, 9, 3], start=1)]
LENGTHS = [len(document) for document in DOCUMENTS]
PLANS = [
    hand_plan(LENGTHS, [(0, 0, 5), (2, 0, 4)], alignment=4),  # document 2 goes on
    hand_plan(LENGTHS, [(2, 4, 5), (1, 0, 1), (3, 0, 3)], slots=[6, 2, 4]),  # each piece padded
    hand_plan(LENGTHS, [], T=4),  # a filler
]


class Plan:
    """A step of one data-parallel rank."""

    def __init__(self, microbatches, step=3):
        self.microbatches, self.step = [microbatches], step


def built(corpus=None):
    corpus = corpus or ListCorpus(DOCUMENTS)
    return [build_microbatch(plan, corpus, pad_token_id=7, step=3, index=index) for index, plan in enumerate(PLANS)]


def test_the_peers_of_a_reader_get_its_microbatches_and_read_nothing():
    def job(rank, world):
        corpus = ListCorpus(DOCUMENTS if rank == 0 else [[0] * n for n in LENGTHS])
        tokens = TokenBroadcast(torch.distributed.new_group([0, 1]), corpus, data_parallel_rank=0, pad_token_id=7)
        mine = built(corpus) if tokens.reads else []
        received = tokens.share(Plan(PLANS), mine)
        return (received is None) if rank == 0 else (received, corpus.reads)

    alone, (received, reads) = launch(2, job)
    assert alone and not reads
    for microbatch, expected in zip(received, built(), strict=True):
        for name in ("tokens", "labels", "position_ids", "loss_mask"):
            assert torch.equal(getattr(microbatch, name), getattr(expected, name)), name
        assert content_checksum(microbatch) == content_checksum(expected)
        assert (microbatch.step, microbatch.index) == (expected.step, expected.index)
        if microbatch.plan.pieces:
            check_microbatch(microbatch, DOCUMENTS, pad_token_id=7)


def test_a_step_without_tokens_sends_nothing():
    def job(rank, world):
        tokens = TokenBroadcast(torch.distributed.new_group([0, 1]), ListCorpus(DOCUMENTS), data_parallel_rank=0, pad_token_id=7)
        mine = [build_microbatch(PLANS[2], ListCorpus(DOCUMENTS), pad_token_id=7, step=3, index=0)] if rank == 0 else []
        received = tokens.share(Plan(PLANS[2:]), mine)
        torch.distributed.barrier()  # else the rank that sends nothing is gone before the other has connected
        return None if received is None else received[0].tokens.tolist()

    assert launch(2, job) == [None, [[7, 7, 7, 7]]]


def test_ids_are_those_that_the_builder_reads_in_its_order():
    corpus = ListCorpus(DOCUMENTS)
    sent = np.concatenate(list(_ids_of(built(corpus), corpus.lengths)))
    assert len(sent) == sum(sum(segment_sizes(plan, corpus.lengths)) for plan in PLANS)
    assert sent.tolist() == [token for document, start, length in corpus.reads for token in DOCUMENTS[document][start : start + length]]


def test_joined_documents_are_given_on_whole():
    """Labels cross the documents there; the step's plan says what the last one is."""
    config = PlanConfig(max_tokens_per_microbatch=7, global_batch_size=4, document_order="sequential", microbatching="concat-chunk")
    plan = Planner(np.array(LENGTHS), config).plan(0)
    expected = [build_microbatch(part, ListCorpus(DOCUMENTS), step=0, index=i) for i, part in enumerate(plan.microbatches[0])]
    assert len(expected) == 3 and all(part.joined for part in plan.microbatches[0])

    def job(rank, world):
        tokens = TokenBroadcast(torch.distributed.new_group([0, 1]), ListCorpus(DOCUMENTS), data_parallel_rank=0, pad_token_id=0)
        return tokens.share(plan, expected if rank == 0 else [])

    for microbatch, other in zip(launch(2, job)[1], expected, strict=True):
        assert torch.equal(microbatch.tokens, other.tokens) and torch.equal(microbatch.labels, other.labels)
        assert torch.equal(microbatch.loss_mask, other.loss_mask)


def test_too_few_ids_are_refused():
    with pytest.raises((MicrobatchError, ValueError)):
        build_microbatch(PLANS[0], ListCorpus(DOCUMENTS), step=0, index=0, segments=[np.zeros(4, np.int32), np.zeros(5, np.int32)])


def test_the_checksum_sees_each_token_and_the_one_after_a_piece():
    [first, *_] = built()
    for document, at in ((0, 0), (0, 4), (2, 3), (2, 4)):  # the last is only a label
        changed = [list(ids) for ids in DOCUMENTS]
        changed[document][at] += 1
        assert content_checksum(built(ListCorpus(changed))[0]) != content_checksum(first)
    assert content_checksum(built()[0]) == content_checksum(first)
