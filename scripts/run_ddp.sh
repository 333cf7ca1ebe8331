#!/usr/bin/env bash
# [CONFIG=my.yaml] scripts/run_ddp.sh [GPUS] [section.key=value ...]     GPUS: all there are; without any, 2 processes
set -euo pipefail
[[ ${1:-} == *=* ]] && set -- "" "$@"
gpus=${1:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
exec torchrun --standalone --nproc-per-node="$gpus" -m lockstep.worker "${CONFIG:-$(dirname "$0")/../examples/mnist.yaml}" "${@:2}"
