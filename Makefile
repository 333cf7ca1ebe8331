# Two commands do all set-up: `make demo` trains a model from start to export, `make test` runs every test.
.PHONY: setup demo test test-all test-matrix test-browser test-slurm soak check format

BIN := .venv/bin
# Hundreds of processes import Lockstep: without its bytecode cache each of them would compile it.
export PYTHONDONTWRITEBYTECODE :=
# Files of tests are shared out to as many processes as there are cores, at most four: each starts several of its own.
SHARED_OUT := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

setup:
	@./setup.sh

demo: setup
	@./demo.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest $(SHARED_OUT)

# make test, test-browser and test-slurm in one go: what CI runs after `make check`.
test-all: setup
	@tests/browser/packages.sh
	@tests/cluster/packages.sh
	$(BIN)/python -m pytest $(SHARED_OUT) -m "not matrix and not soak"

test-matrix: setup
	$(BIN)/python -m pytest -m matrix

test-browser: setup
	@tests/browser/packages.sh
	$(BIN)/python -m pytest -m browser

test-slurm: setup
	@tests/cluster/packages.sh
	$(BIN)/python -m pytest -m slurm

soak: setup
	$(BIN)/python -m pytest -m soak -s

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
