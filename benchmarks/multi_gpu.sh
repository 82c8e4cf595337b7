#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Overlap, pipelines and data parallelism on several GPUs of one host, in one call of at most ten minutes. See multi_gpu.py for what is run.
#
#   bash benchmarks/multi_gpu.sh --output runs/multi_gpu                                      on all GPUs
#   bash tests/gpu/one_card.sh -- bash benchmarks/multi_gpu.sh --gpus 2 --smoke               two ranks on one GPU, for function
#   PYTHON=.venv/bin/python bash benchmarks/multi_gpu.sh --cpu --gpus 2                       on a CPU, for function
set -eu
here=$(cd "$(dirname "$0")" && pwd)
# UserBuffers over CUDA IPC, never over NVLink multicast: a process that dies with multicast objects can take the fabric of a shared host with it.
export UB_SKIPMC=1
# The same for everybody else who would use multicast: NCCL (NVLS), torch's symmetric memory, NVSHMEM.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
# One hardware queue: communication kernels start before the products they overlap with, in the order of their launch.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONUNBUFFERED=1
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-python3}"
if ! "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))'; then
  echo "multi_gpu.sh: $python has no torch: name the interpreter that does, PYTHON=.../bin/python" >&2
  exit 2
fi
exec "$python" "$here/multi_gpu.py" "$@"
