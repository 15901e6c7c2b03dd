#!/usr/bin/env bash
# BranchGRPO on FLUX.1-dev, LoRA: GPUS (8) processes with one prompt each, 16 leaves a prompt.
#   scripts/train_flux_8gpu.sh prompts.txt [KEY=VALUE ...]
# Its reward, HPS-v2.1, looks for hps_ckpt/HPS_v2.1_compressed.pt: hf download xswu/HPSv2 HPS_v2.1_compressed.pt --local-dir hps_ckpt
set -euo pipefail
prompts=${1:?a file of prompts}
accelerate launch --num_processes="${GPUS:-8}" "$(dirname "$0")/../train.py" --config-name flux_branch \
    prompts.path="$prompts" tree.split_points=0,3,6,9 tree.split_noise_scale=4 "${@:2}"
