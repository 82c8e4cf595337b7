# SPDX-License-Identifier: Apache-2.0
"""The settings that make Megatron's schedules right for variable T, and the shapes that are refused."""

import pytest

from megatron_dyn.pipeline.schedule import check_schedule, microbatch_multiple, schedule_settings


def test_no_schedule_frees_outputs_that_are_still_sent():
    for shape in [(1, None), (2, None), (4, None), (2, 2), (4, 2)]:
        assert schedule_settings(*shape)["deallocate_pipeline_outputs"] is False


def test_interleaving_always_overlaps_its_communication():
    settings = schedule_settings(2, 2)
    assert settings["overlap_p2p_comm"] and not settings["batch_p2p_comm"]


def test_shapes_are_exchanged_exactly_where_there_is_a_pipeline():
    assert not schedule_settings(1, None)["variable_seq_lengths"]
    assert schedule_settings(2, None)["variable_seq_lengths"]


@pytest.mark.parametrize("shape, complaint", [((1, 2), "at least two pipeline ranks"), ((2, 1), "at least 2"), ((2, 0), "at least 2")])
def test_impossible_shapes_are_refused(shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_schedule(*shape)


def test_interleaving_wants_whole_groups_of_microbatches():
    assert microbatch_multiple(4, 2) == 4
    assert microbatch_multiple(4, None) == 1
