// SPDX-License-Identifier: Apache-2.0
// Stands in for NCCL's header where none is installed: this folder is searched last.
//
// Transformer Engine's headers (2.20) name the handle below in declarations that nothing here calls.

#ifndef MEGATRON_DYN_NCCL_SHIM_H_
#define MEGATRON_DYN_NCCL_SHIM_H_

typedef struct ncclComm *ncclComm_t;

#endif  // MEGATRON_DYN_NCCL_SHIM_H_
