# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's pipeline schedules, restricted to the settings that are right when T differs between microbatches.

What megatron-core 0.16.1 does with variable T (measured on gloo):

    schedule                                                        outcome
    1F1B, variable_seq_lengths                                      correct
    interleaved, overlap_p2p_comm, no deallocation of outputs       correct
    interleaved with PP=2 and no p2p overlap                        wrong values in silence (constant T) or a crash
    interleaved, p2p overlap, deallocate_pipeline_outputs           wrong values in silence where shapes are not exchanged
    interleaved with PP=4, no p2p overlap, variable T               hangs

The caller never chooses: `schedule_settings` returns the safe row.
"""


def check_schedule(pipeline_parallel: int, virtual_stages: int | None) -> None:
    """Refuse a pipeline shape that has no correct schedule.

    Args:
        pipeline_parallel: Pipeline stages (PP).
        virtual_stages: Model chunks on each pipeline rank, or None without interleaving.

    Raises:
        ValueError: The combination has no schedule.
    """
    if virtual_stages is None:
        return
    if virtual_stages < 2:
        raise ValueError(f"{virtual_stages} virtual stages per pipeline rank: the interleaved schedule needs at least 2 (or leave it out)")
    if pipeline_parallel < 2:
        raise ValueError(
            f"{virtual_stages} virtual stages on a pipeline of {pipeline_parallel}: interleaving needs at least two pipeline ranks; "
            "raise --pipeline-model-parallel-size or leave --num-virtual-stages-per-pipeline-rank out"
        )


def schedule_settings(pipeline_parallel: int, virtual_stages: int | None) -> dict:
    """`TransformerConfig` fields that make Megatron's schedule correct for a T that changes from microbatch to microbatch.

    Args:
        pipeline_parallel: Pipeline stages (PP).
        virtual_stages: Model chunks on each pipeline rank, or None.

    Returns:
        Keyword arguments of `megatron.core.transformer.TransformerConfig`.
    """
    check_schedule(pipeline_parallel, virtual_stages)
    interleaved = virtual_stages is not None
    return dict(
        pipeline_model_parallel_size=pipeline_parallel,
        virtual_pipeline_model_parallel_size=virtual_stages,
        variable_seq_lengths=pipeline_parallel > 1,
        # Interleaving without p2p overlap exchanges two shapes between the same two ranks in an order nobody fixes.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The overlapped sends still read an output after the schedule would have freed it.
        deallocate_pipeline_outputs=False,
    )


def microbatch_multiple(pipeline_parallel: int, virtual_stages: int | None) -> int:
    """The number that each rank's microbatch count must be a multiple of.

    The interleaved schedule walks through the microbatches in groups of PP and refuses a smaller last group
    (`forward_backward_pipelining_with_interleaving` in megatron-core).
    """
    return pipeline_parallel if virtual_stages is not None else 1
