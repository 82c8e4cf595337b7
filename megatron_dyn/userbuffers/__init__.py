# SPDX-License-Identifier: Apache-2.0
"""UserBuffers with an active shape: registered once for [max_tokens, hidden], used for the [T, hidden] of each microbatch.

    from megatron_dyn import userbuffers as ub

    ub.initialize_ub([max_tokens, hidden], tp_size, dtype=torch.bfloat16)      # once, on every rank
    ub.set_ub_active_shape([T, hidden])                                        # before a microbatch, and before its backward

The layers of `megatron_dyn.layers` set the shape themselves, from their own input; then there is nothing to call. The interface is that of
the proposal in TransformerEngine #3564.
"""

from megatron_dyn.userbuffers.communicator import Communicator, CommunicatorSpec
from megatron_dyn.userbuffers.configuration import DGRADS_OF_COLUMNS, OverlapConfigError, communicator_specs, read_overlap_config
from megatron_dyn.userbuffers.lifecycle import (
    NotInitializedError,
    current,
    destroy_ub,
    get_ub,
    get_ub_active_shape,
    get_ub_capacity_shape,
    initialize_ub,
    is_ub_initialized,
    set_ub_active_shape,
)
from megatron_dyn.userbuffers.manager import UserBuffers
from megatron_dyn.userbuffers.quantization import UserBufferQuantizationMode
from megatron_dyn.userbuffers.shape import ActiveShapeError, check_active_shape

__all__ = [
    "ActiveShapeError",
    "Communicator",
    "CommunicatorSpec",
    "DGRADS_OF_COLUMNS",
    "NotInitializedError",
    "OverlapConfigError",
    "UserBufferQuantizationMode",
    "UserBuffers",
    "check_active_shape",
    "communicator_specs",
    "current",
    "destroy_ub",
    "get_ub",
    "get_ub_active_shape",
    "get_ub_capacity_shape",
    "initialize_ub",
    "is_ub_initialized",
    "read_overlap_config",
    "set_ub_active_shape",
]
