# Two commands do all set-up: `make demo` trains a model from start to export, `make test` runs every test.
.PHONY: setup demo test test-matrix test-browser test-slurm soak check format

BIN := .venv/bin

setup:
	@./setup.sh

demo: setup
	@./demo.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest

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
