#!/usr/bin/env bash
# Train with torchrun, one process per GPU.
#     scripts/run_ddp.sh [GPUS] [CONFIG.yaml] [section.key=value ...]
#     scripts/run_ddp.sh [GPUS] SCRIPT.py [ARGUMENT ...]
# GPUS: number of processes; default: all GPUs, or 2 processes if there are none. CONFIG.yaml: default examples/mnist.yaml
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# use the first Python that has Lockstep: of the active environment, else of the .venv made by `make setup`
for python in python python3 "$here/../.venv/bin/python"; do
    if "$python" -c 'from importlib.util import find_spec as find; exit(not (find("lockstep.run.worker") and find("torch")))' \
        >/dev/null 2>&1; then
        exec "$python" "$here/run_ddp.py" "$@"
    fi
done
echo "Lockstep is not installed here: run \`make setup\` in $(dirname "$here"), or activate the environment that has it" >&2
exit 1
