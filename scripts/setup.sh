#!/usr/bin/env bash
# All set-up of a fresh machine: .venv with pinned packages, and the shared folders. A second run changes nothing.
# EXTRAS: what is installed beside training, from pyproject.toml; "dev", the default, is everything.
# PYTHON, VENV and TORCH choose another Python, another folder and another version of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} venv=${VENV:-.venv}
extras=${EXTRAS:-dev}
torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Lockstep needs Python 3.11, 3.12 or 3.13; name one with PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
}
[[ $torch =~ ^2\.1[123](\.|$) ]] || {
    echo "Lockstep needs torch 2.11, 2.12 or 2.13, and TORCH is $torch" >&2
    exit 1
}
mkdir -p data models runs

wanted=$(cat constraints.txt pyproject.toml scripts/setup.sh - <<<"$torch" | sha256sum)
for stamp in "$venv"/.lockstep-installed-{dev,"$extras"}; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        exit 0
    fi
done
echo "installing into $venv (once, a few minutes) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
constraints=$venv/constraints.txt
cp constraints.txt "$constraints"
if ! grep -qx "torch==$torch" constraints.txt; then # older ones have their own limit on setuptools
    grep -Ev '^(setuptools|torch)==' constraints.txt >"$constraints"
fi
install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"; }
install "torch==$torch" # first and exact, so that nothing else chooses another build
install --editable ".[$extras]"
echo "$wanted" >"$stamp"
