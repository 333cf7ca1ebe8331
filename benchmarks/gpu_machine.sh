#!/usr/bin/env bash
# The tests and benchmarks of a GPU on a machine without network, whose python3 (3.12) has torch with CUDA, transformers,
# accelerate, lightning and pytest with xdist and timeout. On a machine with network, in a clone:
#   benchmarks/gpu_machine.sh pack DIR            # what is committed, and the wheels that such a machine lacks: 15 MB
# DIR/data/mnist/ may hold the real MNIST; without it images are made. On the machine with the GPU:
#   bash DIR/benchmarks/gpu_machine.sh run [SECONDS_FOR_EACH=240]
# It installs nothing over that Python. Results are printed, and in $OUT (by default DIR/out). TEST_OPTIONS and
# BENCHMARK_OPTIONS are further words for the two, such as "-k encoder" and "--tiny --device cpu".
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
lacking=(annotated-types certifi charset-normalizer fastapi fastapi-offline httptools idna importlib-metadata nvidia-ml-py
  opentelemetry-api platformdirs pooch pydantic pydantic-core python-multipart requests starlette typing-extensions
  typing-inspection urllib3 uvicorn)

pack() {
  set -e
  mkdir -p "$1/wheels"
  git -C "$root" archive HEAD | tar -x -C "$1"
  platforms=()
  for each in 2_28 2_27 2_17 2014 1; do platforms+=(--platform "manylinux${each/#2_/_2_}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --constraint "$root/constraints.txt" --dest "$1/wheels" "${lacking[@]}"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$1/wheels" "$1"
  rm -rf "$1/build"
}

run() {
  out=${OUT:-$root/out}
  site=$(mktemp -d)
  mkdir -p "$out"
  "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$root"/wheels/*.whl || exit 2
  export PYTHONPATH=$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 LOCKSTEP_TEST_DATA=${LOCKSTEP_TEST_DATA:-$root/data}
  cd "$root" || exit 2
  # shellcheck disable=SC2086
  timeout --signal INT "$1" "$python" -m pytest -v -n auto --dist worksteal -m gpu tests/gpu ${TEST_OPTIONS:-} 2>&1 |
    tee "$out/tests.txt"
  tests=$?
  # shellcheck disable=SC2086
  "$python" benchmarks/gpu.py --seconds "$1" --out "$out/gpu.md" ${BENCHMARK_OPTIONS:-} 2>&1 | tee "$out/benchmarks.txt"
  benchmarks=$?
  rm -rf "$site"
  exit $((tests > benchmarks ? tests : benchmarks))
}

case "${1:-}" in
  pack) pack "${2:?pack DIR}" ;;
  run) run "${2:-240}" ;;
  *) sed -n '2,9s/^# //p' "$0"; exit 2 ;;
esac
