#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on one node's GPUs.
#
#   DATA_PATH=corpora/mine TOKENIZER_MODEL=tokenizer.model bash examples/node/train_one_gpu_node.sh [flags of pretrain_gpt_thd.py ...]
#
# DATA_PATH         prefix of a .bin/.idx pair, or "0.7 A 0.3 B" for several with weights (examples/README.md says how to make one)
# TOKENIZER_MODEL   the sentencepiece model that the corpus was made with
# GPUS              processes to start (default 8)
# CONFIG            settings (default examples/configs/gpt_1b.yaml); flags given here win over them
# RUN_DIR           where checkpoints, metrics and plots go (default runs/gpt); started again, the run continues from its last checkpoint
set -eu
: "${DATA_PATH:?set DATA_PATH to the prefix of a .bin/.idx pair}"
: "${TOKENIZER_MODEL:?set TOKENIZER_MODEL to the sentencepiece model of the corpus}"
repository=$(cd "$(dirname "$0")/../.." && pwd)
run_dir=${RUN_DIR:-runs/gpt}

# Without this, kernels of the backward pass may be queued in an order in which communication and computation do not overlap.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# On SIGTERM torchrun gives its ranks this many seconds to save (30 unless said); the ranks leave with 0, torchrun itself with 1.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-170}

read -ra data_path <<< "$DATA_PATH"
exec torchrun --standalone --nproc-per-node "${GPUS:-8}" "$repository/pretrain_gpt_thd.py" \
    --config "${CONFIG:-$repository/examples/configs/gpt_1b.yaml}" \
    --data-path "${data_path[@]}" \
    --tokenizer-model "$TOKENIZER_MODEL" \
    --save "$run_dir/checkpoints" --load "$run_dir/checkpoints" \
    --run-dir "$run_dir" \
    "$@"
