#!/bin/bash
# Pretrain on several nodes. sbatch examples/slurm.sh; the job goes on by itself after preemption or a failed node.
#SBATCH --job-name=meshkit
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# 120 s before the time is up torchrun gets SIGTERM and hands it on: the ranks save a checkpoint and leave.

set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Rows of uneven lengths leave holes between blocks of one size; segments that grow do not.
export PYTORCH_ALLOC_CONF=expandable_segments:True

# Each rank runs on the cores, and with the memory, of its GPU's socket (NUMA node).
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 --numa-binding node \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    examples/llama_pretrain.py \
    --model llama3-8b --mesh "dp_replicate=-1 dp_shard=8" --precision bf16 --compile --recompute selective \
    --seq-len 8192 --global-batch 256 --microbatches 8 --steps 100000 --save-every 500 \
    --data "corpus/*.jsonl" --tokenizer tokenizer --out runs/8b "$@"
