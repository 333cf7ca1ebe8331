# Two commands do all set-up: `make demo` trains a model from start to export, `make test` tests in minutes.
.PHONY: setup packages demo test test-all test-versions test-matrix test-browser test-slurm test-ray images test-gpu durations soak chaos bench-check check docs pictures format

VENV ?= .venv
BIN := $(VENV)/bin
export VENV
# Hundreds of processes import Lockstep: without its bytecode cache each of them would compile it.
export PYTHONDONTWRITEBYTECODE :=
# Files of tests are shared out to several processes: how many, and in what order, is said in tests/conftest.py. With
# several threads each, they would wait for one another.
SHARED_OUT := -n auto --dist loadfile --no-loadscope-reorder
ONE_THREAD := OMP_NUM_THREADS=1

setup:
	@scripts/setup.sh

# It installs what training, evaluation, export and serving need; `make setup` adds what tests, docs and trackers need.
demo:
	@EXTRAS=hub,serve scripts/setup.sh
	@scripts/demo.sh

# Of Debian, for the tests in a browser and those on a Slurm cluster.
packages:
	@tests/browser/packages.sh
	@tests/cluster/packages.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests that take less than 0.7 seconds each, and those marked `core`: each command, a kill, a lost process.
test: setup
	$(ONE_THREAD) $(BIN)/python -m pytest $(SHARED_OUT) --quick

# All tests but the matrix and the long runs, those in a browser, on Slurm and on Ray among them: what CI runs after `make check`.
test-all: setup packages
	$(ONE_THREAD) LOCKSTEP_FUZZ_SECONDS=2 $(BIN)/python -m pytest $(SHARED_OUT) -m "not matrix and not soak and not gpu and not images"

# How long each test takes, by which later runs choose and share them out: tests/durations.json.
durations: setup packages
	LOCKSTEP_TEST_DURATIONS=write $(MAKE) test-all

# The test suite under the other versions of Python and torch that Lockstep supports, each in a venv of its own.
test-versions:
	@.ci/versions

test-matrix: setup packages
	$(ONE_THREAD) $(BIN)/python -m pytest $(SHARED_OUT) -m matrix

test-browser: setup
	@tests/browser/packages.sh
	$(BIN)/python -m pytest -m browser

test-slurm: setup
	@tests/cluster/packages.sh
	$(BIN)/python -m pytest -m slurm

test-ray: setup
	@tests/cluster/packages.sh
	$(BIN)/python -m pytest -m ray

# Builds the images of deploy/ as root on Debian, says how large they are, and runs them: the demo, servers, pods.
images: setup
	@scripts/images.sh
	$(BIN)/python -m pytest -m images

# Fails where there is no GPU; LOCKSTEP_TEST_DEVICE=cpu tries the tests themselves on the CPU.
test-gpu: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m gpu

soak: setup
	$(BIN)/python -m pytest -m soak -s

# 375 random faults in runs with live recovery, others with another SEED: prints how many of each kind in each phase.
chaos: setup
	CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -m soak -s tests/commands/test_live.py tests/commands/test_live_replicas.py

# Fails where Lockstep is slower than a tuned hand-written loop: make bench-check DATA=FOLDER MODEL=MINILM
bench-check: setup
	@[ -d "$(DATA)/mnist" ] && [ -d "$(DATA)/ag_news" ] && [ -d "$(MODEL)" ] || { echo "give DATA=FOLDER (with mnist/ \
	and ag_news/) and MODEL=FOLDER (all-MiniLM-L6-v2)" >&2; exit 2; }
	@benchmarks/peers/install.sh
	$(BIN)/python benchmarks/compare.py --data $(DATA) --model $(MODEL) --works mnist-64 minilm-32 \
	  --contenders "Lockstep exact" --rounds 3 --at-least 1.0

# The pages of docs/ as a site, in site/, and the man page; fails for a broken link. tests/docs/test_site.py builds it, too.
docs: setup
	@$(BIN)/python docs/_man_page.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built site/; $(BIN)/mkdocs serve shows it, and changes as they are made"

# The pictures of README.md, from real runs.
pictures: setup
	@tests/browser/packages.sh
	PYTHONPATH=tests/support $(BIN)/python docs/_pictures.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
