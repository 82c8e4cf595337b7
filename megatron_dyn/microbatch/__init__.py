# SPDX-License-Identifier: Apache-2.0
"""From a StepPlan and a corpus to the tensors of its microbatches, ahead of time."""

from megatron_dyn.microbatch.builder import MicrobatchError, build_microbatch
from megatron_dyn.microbatch.packed import PackedMicrobatch
from megatron_dyn.microbatch.stream import StepStream, StreamError

__all__ = ["MicrobatchError", "PackedMicrobatch", "StepStream", "StreamError", "build_microbatch"]
