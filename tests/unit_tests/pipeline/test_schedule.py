# SPDX-License-Identifier: Apache-2.0
"""The settings that make Megatron's schedules right for variable T, and the shapes that are refused."""

import pytest

from megatron_dyn.pipeline.schedule import check_microbatches, check_schedule, microbatch_multiple, schedule_settings


def test_outputs_are_freed_where_there_is_a_pipeline_that_sends_them():
    for shape, freed in [((1, None), False), ((2, None), True), ((4, None), True), ((2, 2), True), ((4, 2), True)]:
        assert schedule_settings(*shape)["deallocate_pipeline_outputs"] is freed


@pytest.mark.parametrize(
    "shape, wanted, overlapped, flushed",
    [
        ((2, 2), dict(), True, False),
        ((2, 2), dict(overlap=False), False, False),
        ((4, 2), dict(warmup_flush=True), True, True),
        ((4, None), dict(), False, False),
    ],
)
def test_messages_are_batched_where_they_are_not_overlapped(shape, wanted, overlapped, flushed):
    settings = schedule_settings(*shape, **wanted)
    found = (settings["overlap_p2p_comm"], settings["overlap_p2p_comm_warmup_flush"], settings["batch_p2p_comm"])
    assert found == (overlapped, flushed, not overlapped)


@pytest.mark.parametrize("shape, wanted", [((4, None), dict(warmup_flush=True)), ((4, 2), dict(warmup_flush=True, overlap=False))])
def test_a_warmup_flush_without_overlap_is_refused(shape, wanted):
    with pytest.raises(ValueError, match="--overlap-p2p-communication-warmup-flush"):
        check_schedule(*shape, **wanted)


@pytest.mark.parametrize("count, shape, complaint", [(3, (2, 2), "a multiple of 2"), (0, (2, None), "at least one"), (5, (4, 3), "a multiple of 4")])
def test_numbers_of_microbatches_without_a_schedule_are_refused(count, shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_microbatches(count, *shape)
    check_microbatches(4, 4, 3)
    check_microbatches(3, 4, None)


def test_lengths_vary_exactly_where_there_is_a_pipeline():
    assert not schedule_settings(1, None)["variable_seq_lengths"]
    assert schedule_settings(2, None)["variable_seq_lengths"]


@pytest.mark.parametrize("shape, complaint", [((1, 2), "at least two pipeline ranks"), ((2, 1), "at least 2"), ((2, 0), "at least 2")])
def test_impossible_shapes_are_refused(shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_schedule(*shape)


def test_interleaving_wants_whole_groups_of_microbatches():
    assert microbatch_multiple(4, 2) == 4
    assert microbatch_multiple(4, None) == 1
