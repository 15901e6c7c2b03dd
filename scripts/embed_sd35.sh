#!/usr/bin/env bash
# Encode a file of prompts with SD3.5-medium's text encoders, shared out among GPUS (8) processes; again goes on where it stopped.
#   scripts/embed_sd35.sh prompts.txt [KEY=VALUE ...]
set -euo pipefail
prompts=${1:?a file of prompts}
accelerate launch --num_processes="${GPUS:-8}" -m arborl embed "$prompts" model=sd35_medium "${@:2}"
