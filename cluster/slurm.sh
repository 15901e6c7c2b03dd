#!/usr/bin/env bash
# sbatch cluster/slurm.sh -c base run_name=my-run sample.num_prompts=2 …
# One task a GPU, no launcher in between: each process gets the signals that Slurm sends. Before its time is up (or when
# it is preempted) a run saves and leaves; the job is queued again and the same command goes on where it stopped.
# Set partition, account and time with sbatch options.
#SBATCH --job-name=arborl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
export MASTER_PORT="${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}"
export WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"

code=0
# A rank that fails ends the others (--kill-on-bad-exit), so nobody waits for it.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c \
    'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank \
    "${PYTHON:-python}" train.py --resume auto "$@" || code=$?

# Stopped by a signal, and not at its end: 130 with what was done saved, 143 before there was anything to save.
if [ "$code" -eq 130 ] || [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
