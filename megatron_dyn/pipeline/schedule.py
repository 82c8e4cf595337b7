# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's pipeline schedules with the settings that are right when T differs between microbatches.

What megatron-core 0.16.1 does with variable T (measured on gloo), and what it does with the planned communicator (`planned_p2p.py`):

    schedule                                            stock communicator                              planned
    1F1B                                                right, with a shape message for each tensor     right, without
    interleaved, overlapped, outputs not freed          right, with a shape message for each tensor     right, without
    interleaved, overlapped, outputs freed              wrong in silence where shapes are constant      right: a send keeps its tensor
    interleaved, not overlapped, PP = 2                 wrong in silence (constant T) or a crash        right: forward is posted first
    interleaved, not overlapped, PP = 4, K = 4          hangs: shapes go in two phases                  right: there is one phase
    interleaved, K not a multiple of PP                 refused                                         refused before the step
"""


def check_schedule(pipeline_parallel: int, virtual_stages: int | None, *, overlap: bool = True, warmup_flush: bool = False) -> None:
    """Refuse a pipeline that has no correct schedule.

    Args:
        pipeline_parallel: Pipeline stages (PP).
        virtual_stages: Model chunks on each pipeline rank, or None without interleaving.
        overlap: Messages between stages travel while the interleaved schedule computes.
        warmup_flush: Also while the pipeline fills and empties.

    Raises:
        ValueError: The combination has no schedule.
    """
    if warmup_flush and (virtual_stages is None or not overlap):
        raise ValueError(
            "--overlap-p2p-communication-warmup-flush overlaps more of what the interleaved schedule overlaps: it needs "
            "--num-virtual-stages-per-pipeline-rank and no --no-overlap-p2p-communication; leave it out or give what it needs"
        )
    if virtual_stages is None:
        return
    if virtual_stages < 2:
        raise ValueError(f"{virtual_stages} virtual stages per pipeline rank: the interleaved schedule needs at least 2 (or leave it out)")
    if pipeline_parallel < 2:
        raise ValueError(
            f"{virtual_stages} virtual stages on a pipeline of {pipeline_parallel}: interleaving needs at least two pipeline ranks; "
            "raise --pipeline-model-parallel-size or leave --num-virtual-stages-per-pipeline-rank out"
        )


def check_microbatches(num_microbatches: int, pipeline_parallel: int, virtual_stages: int | None) -> None:
    """Refuse a number of microbatches that the schedule cannot run, before any rank sends anything.

    Raises:
        ValueError: None at all, or (interleaved) no multiple of PP.
    """
    multiple = microbatch_multiple(pipeline_parallel, virtual_stages)
    if num_microbatches < 1 or num_microbatches % multiple:
        raise ValueError(
            f"{num_microbatches} microbatches on {pipeline_parallel} pipeline ranks with {virtual_stages or 1} chunks each: the schedule takes "
            f"a multiple of {multiple}, at least one; the planner makes it so (`microbatch_multiple`)"
        )


def schedule_settings(
    pipeline_parallel: int, virtual_stages: int | None, *, overlap: bool = True, warmup_flush: bool = False
) -> dict[str, int | bool | None]:
    """`TransformerConfig` fields of the pipeline, for the planned communicator.

    Args: as `check_schedule`.

    Returns:
        Keyword arguments of `megatron.core.transformer.TransformerConfig`.
    """
    check_schedule(pipeline_parallel, virtual_stages, overlap=overlap, warmup_flush=warmup_flush)
    overlap = overlap and virtual_stages is not None  # 1F1B has none
    return dict(
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_stages,
        # The planned communicator needs no exchange of shapes; it stays true that they vary.
        variable_seq_lengths=pipeline_parallel > 1,
        overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=overlap and warmup_flush,
        batch_p2p_comm=not overlap,
        # An output is only sent: its rows are given back as soon as they have left, not after its backward pass.
        deallocate_pipeline_outputs=pipeline_parallel > 1,
    )


def microbatch_multiple(pipeline_parallel: int, virtual_stages: int | None) -> int:
    """The number that each rank's microbatch count must be a multiple of.

    The interleaved schedule walks through the microbatches in groups of PP and refuses a smaller last group
    (`forward_backward_pipelining_with_interleaving` in megatron-core).
    """
    return pipeline_parallel if virtual_stages is not None else 1
