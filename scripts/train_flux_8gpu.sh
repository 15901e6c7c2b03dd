#!/usr/bin/env bash
# BranchGRPO on FLUX.1-dev, LoRA: GPUS (8) processes with one prompt each, 16 leaves a prompt.
#   scripts/train_flux_8gpu.sh prompts.txt [KEY=VALUE ...]
# Its reward, HPS-v2.1, is not built in yet: add one of your own, rewards=none rewards.mine.fn=package.module:function
set -euo pipefail
prompts=${1:?a file of prompts}
accelerate launch --num_processes="${GPUS:-8}" "$(dirname "$0")/../train.py" --config-name flux_branch \
    prompts.path="$prompts" tree.split_points=[0,3,6,9] tree.split_noise_scale=4 "${@:2}"
