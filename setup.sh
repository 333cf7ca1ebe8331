#!/usr/bin/env bash
# All set-up of a fresh machine: .venv with pinned packages, and the shared folders. A second run changes nothing.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Lockstep needs Python 3.11 or newer; name one with PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
}
mkdir -p data models runs

wanted=$(cat constraints.txt pyproject.toml setup.sh | sha256sum)
stamp=.venv/.lockstep-installed
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
echo "installing into .venv (once, a few minutes) ..."
[ -x .venv/bin/python ] || "$python" -m venv .venv
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
install torch   # first and exact, so that nothing else chooses another build
install --editable '.[dev]'
echo "$wanted" >"$stamp"
