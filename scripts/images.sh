#!/usr/bin/env bash
# Builds the images of deploy/ without a registry, as root on Debian: lockstep and lockstep-serve. With a FOLDER that
# `lockstep export --space` has written, lockstep-space too. Its packages are those of VENV's pip, with its settings.
# BASE: an image with Python 3.11 to start from; by default one made of the packages of this machine's Debian mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
python=${VENV:-.venv}/bin/python wheels=${VENV:-.venv}/wheels
base=${BASE:-localhost/lockstep-base}

cannot() {
    echo "THE IMAGES CANNOT BE BUILT: $*" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || cannot "only root can"
for program in buildah debootstrap podman runc; do
    command -v "$program" >/dev/null || cannot "$program is missing:" \
        "apt-get install --no-install-recommends buildah catatonit debootstrap podman runc"
done
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || cannot "they need Python 3.11 in ${VENV:-.venv}"

scratch=$(mktemp --directory)
trap 'rm --recursive --force "$scratch"' EXIT

# The base: Debian's Python, with what it installs in /usr/local, as in the image that the Dockerfiles name.
if [ -z "${BASE:-}" ] && [ -z "$(buildah images --quiet --filter reference="$base")" ]; then
    # shellcheck disable=SC2016 # $(SITE) is apt-get's
    mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,python3-venv bookworm "$scratch/root" ${mirror:+"$mirror"}
    chroot "$scratch/root" sh -c \
        'python3 -m venv /usr/local && apt-get clean && rm -rf /usr/share/doc /usr/share/man /usr/share/locale /var/lib/apt/lists/*'
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$scratch/root" / >/dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah commit --quiet --rm "$container" "$base" >/dev/null
fi

# The packages, so that what is built asks no index.
install --directory "$wheels"
wanted=$(cat constraints.txt pyproject.toml | sha256sum)
torch=$(grep '^torch==' constraints.txt)
if [ "$(cat "$wheels/stamp" 2>/dev/null)" != "$wanted" ]; then
    rm --recursive --force "${wheels:?}"/*
    "$python" -m pip wheel --quiet --constraint constraints.txt --wheel-dir "$wheels" \
        "$torch" '.[hub,serve]' onnxruntime 'setuptools>=77'
    echo "$wanted" >"$wheels/stamp"
fi
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" .
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$scratch/pip.conf"

build() {
    buildah build --quiet --isolation chroot --layers --pull-never --build-arg BASE="$base" --format docker \
        --volume "$PWD/$wheels:/wheels:ro" --volume "$scratch/pip.conf:/etc/pip.conf:ro" --tag "$@" >/dev/null
    echo "$1: $(podman image inspect --format '{{.Size}}' "localhost/$1" | numfmt --to-unit=1M) MB"
}
build lockstep --file deploy/train.Dockerfile .
build lockstep-serve --file deploy/serve.Dockerfile .
if [ $# -gt 0 ]; then
    build lockstep-space --no-cache "$1" # it names no file that changes with Lockstep
fi
