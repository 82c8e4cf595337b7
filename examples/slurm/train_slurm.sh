#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on several nodes under Slurm: one torchrun a node, one process a GPU.
#
#   DATA_PATH=corpora/mine TOKENIZER_MODEL=tokenizer.model sbatch --nodes 2 examples/slurm/train_slurm.sh [flags of pretrain_gpt_thd.py ...]
#
# Submit from the repository's root. Variables are those of examples/node/train_one_gpu_node.sh (CONFIG here: examples/configs/gpt_8b.yaml);
# paths have to be seen by all nodes. Add --account, --partition and --time as your cluster wants them.
#SBATCH --job-name=megatron-dyn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@180
#SBATCH --output=%x-%j.log
set -eu
: "${DATA_PATH:?set DATA_PATH to the prefix of a .bin/.idx pair}"
: "${TOKENIZER_MODEL:?set TOKENIZER_MODEL to the sentencepiece model of the corpus}"
: "${SLURM_JOB_ID:?submit this script with sbatch}"
repository=$SLURM_SUBMIT_DIR
run_dir=${RUN_DIR:-runs/gpt}
gpus=${GPUS:-8}

# Three minutes before the end of its time, Slurm sends SIGTERM to the job's steps; the run saves and leaves. Submitted
# again (or requeued), it continues from there.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export CUDA_DEVICE_MAX_CONNECTIONS=1
# On SIGTERM torchrun gives its ranks this many seconds to save (30 unless said); the ranks leave with 0, torchrun itself with 1.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-170}

read -ra data_path <<< "$DATA_PATH"
srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first_node:$port" \
    "$repository/pretrain_gpt_thd.py" \
    --config "${CONFIG:-$repository/examples/configs/gpt_8b.yaml}" \
    --data-path "${data_path[@]}" \
    --tokenizer-model "$TOKENIZER_MODEL" \
    --save "$run_dir/checkpoints" --load "$run_dir/checkpoints" \
    --run-dir "$run_dir" \
    "$@"
