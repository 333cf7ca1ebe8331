#!/usr/bin/env bash
# The other trainers that compare.py measures, in an environment of their own: benchmarks/peers/.venv.
set -euo pipefail
cd "$(dirname "$0")"
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint ../../constraints.txt "$@"; }
install torch   # first and exact, so that nothing else chooses another build
install accelerate==1.15.0 lightning==2.6.6 numpy psutil transformers
