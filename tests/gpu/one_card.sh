#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# N ranks of one script on one GPU: side by side under CUDA MPS, or taking turns (strong skew: what shows races) with TURNS=1.
#
#   bash tests/gpu/one_card.sh 2 tests/gpu/overlap_values.py --steps 500
#   TURNS=1 bash tests/gpu/one_card.sh 2 tests/gpu/layout_fence.py
#   bash tests/gpu/one_card.sh -- COMMAND ...       any command in that environment: what it starts may share the card
set -eu
ranks=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
cc -shared -fPIC -o "$work/peer.so" "$here/one_card_peer.c"
# UB_SKIPMC: CUDA IPC instead of NVLink multicast. One connection: communication kernels start before the products they overlap with.
export UB_SKIPMC=1 CUDA_DEVICE_MAX_CONNECTIONS=1 MEGATRON_DYN_DISTRIBUTED_BACKEND=gloo OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cleanup() {
  if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ]; then echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true; fi
  rm -rf "$work"
}
trap cleanup EXIT
if [ -z "${TURNS:-}" ]; then
  if ! command -v nvidia-cuda-mps-control >/dev/null; then
    echo "one_card.sh: no nvidia-cuda-mps-control here: start with TURNS=1 to let the ranks take turns" >&2
    exit 1
  fi
  export CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$work/mps-log"
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d
fi
if [ "$ranks" = -- ]; then
  LD_PRELOAD="$work/peer.so" "$@"
  exit
fi
LD_PRELOAD="$work/peer.so" python3 -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
