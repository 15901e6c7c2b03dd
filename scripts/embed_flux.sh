#!/usr/bin/env bash
# Encode a file of prompts with FLUX.1-dev's text encoders, shared out among GPUS (8) processes; again goes on where it stopped.
#   scripts/embed_flux.sh prompts.txt [KEY=VALUE ...]
set -euo pipefail
prompts=${1:?a file of prompts}
accelerate launch --num_processes="${GPUS:-8}" -m arborl embed "$prompts" model=flux_dev "${@:2}"
