#!/usr/bin/env bash
# [CONFIG=my.yaml] scripts/run_ddp.sh [GPUS] [section.key=value ...]     GPUS: all there are; without any, 2 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# the active environment, else the one that `make setup` has made: the first Python that has Lockstep
for python in python python3 "$here/../.venv/bin/python"; do
    if "$python" -c 'from importlib.util import find_spec as find; exit(not (find("lockstep.run.worker") and find("torch")))' \
        >/dev/null 2>&1; then
        exec "$python" "$here/run_ddp.py" "$@"
    fi
done
echo "Lockstep is not installed here: run \`make setup\` in $(dirname "$here"), or activate the environment that has it" >&2
exit 1
