// SPDX-License-Identifier: Apache-2.0
// Stands in for a header of the same name that Transformer Engine's wheels leave out.
//
// transformer_engine/comm_gemm_overlap.h includes it, and needs three things of it: the type of which it keeps a pointer, the two
// callbacks in its constructors (which nothing here calls), and the macro with which its default implementations refuse.

#ifndef MEGATRON_DYN_USERBUFFERS_SHIM_H_
#define MEGATRON_DYN_USERBUFFERS_SHIM_H_

#include <cstddef>
#include <functional>
#include <stdexcept>

struct communicator;

#define ExtComm const char *
using ExtAllgatherOp = std::function<void(void *, std::size_t, void *, std::size_t, ExtComm)>;
using ExtBarrierOp = std::function<void(ExtComm)>;

#ifndef NVTE_ERROR
#define NVTE_ERROR(...) throw std::runtime_error("this communicator of Transformer Engine does not offer the operation")
#endif

#endif  // MEGATRON_DYN_USERBUFFERS_SHIM_H_
