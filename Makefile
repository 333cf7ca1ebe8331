# Two commands do all set-up: `make demo` trains a model from start to export, `make test` runs every test.
.PHONY: setup demo test check format

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

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
