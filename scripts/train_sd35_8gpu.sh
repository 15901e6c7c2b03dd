#!/usr/bin/env bash
# TreeGRPO on SD3.5-medium, as in the paper's main set-up: GPUS (8) processes with two prompts each.
#   scripts/train_sd35_8gpu.sh prompts.txt [KEY=VALUE ...]
# Its reward, HPS-v2.1, looks for hps_ckpt/HPS_v2.1_compressed.pt: hf download xswu/HPSv2 HPS_v2.1_compressed.pt --local-dir hps_ckpt
set -euo pipefail
prompts=${1:?a file of prompts}
accelerate launch --num_processes="${GPUS:-8}" "$(dirname "$0")/../train.py" --config-name base \
    prompts.path="$prompts" sample.num_prompts=2 sample.num_trees=1 tree.w=4 tree.k=2 "${@:2}"
