"""Readers of what comes from somebody else, fed by hypothesis: each input ends in a value or in one of our errors.

A target is a few lines: a strategy for its inputs, and a function that reads one in an empty folder.

    @target(damaged(b'{"step": 1}', st.sampled_from([b"NaN", b"9" * 400])))
    def exports(folder, data):
        (folder / "lockstep.json").write_bytes(data)
        export_reader.read(folder)

It runs in a process of its own (`fuzzing.py`): what crashes natively, hangs, eats memory or executes code in the input
fails the test. Every target is tried for LOCKSTEP_FUZZ_SECONDS. `corpus/TARGET/` has what hypothesis has found, to be
committed with the fix: it is tried first. `pytest tests/test_fuzz_readers.py -k NAME -s` says how many were tried.
"""

import itertools
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import engine

from lockstep.base.errors import UserError
from lockstep.tools.sweep import sweep_state

SECONDS = float(os.environ.get("LOCKSTEP_FUZZ_SECONDS", "3"))
"""For a target."""
EXAMPLE_SECONDS = 10
"""For one input: on a busy machine, many times what it takes."""
SHRINK_SECONDS = 20
"""For making an input that fails smaller."""
CORPUS = Path(__file__).parent / "corpus"
TARGETS = {}


def target(inputs):
    """Register a function (folder, input) with the strategy for its inputs."""

    def register(read):
        TARGETS[read.__name__] = (inputs, read)
        return read

    return register


HOSTILE = st.sampled_from(
    b"""NaN -Infinity 1e300 1e999 5e-324 -1 1e15 true null "" "3" "\\ud800" "\\u001b[2J" "../../x" "/dev/zero" [] {} [[1]]
    {"a":{}} \0 \xff\xfe &a[*a] !!python/name:os.system 2024-01-01""".split()
    + [b"9" * 400, b"9" * 5000, b"[" * 9000, b'{"a":' * 9000, b"\n", b"\r\n"]
)
"""In place of a value in JSON or YAML."""


@st.composite
def damaged(draw, seed, tokens=HOSTILE):
    """`seed` (bytes, or a strategy for bytes) with up to three places cut out, repeated or replaced.

    Half of them are whole values: what is between two of `:,[]{}` and line breaks.
    """
    data = draw(seed) if isinstance(seed, st.SearchStrategy) else seed
    for _ in range(draw(st.integers(0, 3))):
        edges = [0, *(i + 1 for i, byte in enumerate(data) if byte in b":,[]{}\n")] if draw(st.booleans()) else None
        spot = st.sampled_from(edges) if edges else st.integers(0, len(data))
        begin = draw(spot)
        end = next((i for i in edges if i > begin), len(data) + 1) - 1 if edges else draw(st.integers(begin, len(data)))
        new = draw(st.one_of(tokens, st.just(b""), st.just(data[begin:end] * 2), st.binary(max_size=8)))
        data = data[:begin] + new + data[end:]
    return data


@st.composite
def folder_of(draw, files):
    """Name -> bytes of a folder, one or two of whose files are damaged."""
    names = draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True))
    return files | {name: draw(damaged(files[name])) for name in names}


def written(folder, files):
    """Make such a folder."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@contextmanager
def limited(seconds):
    """Raise TimeoutError after so much time."""

    def raise_timeout(*_):
        raise TimeoutError(f"one input took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def session(name, seconds):
    """Try a target for so long, in the current folder. Raises what the reader should not have."""
    inputs, read = TARGETS[name]
    tried, end, place = itertools.count(), time.monotonic() + seconds, Path("input").absolute()
    database = DirectoryBasedExampleDatabase(CORPUS / name)

    def example(given_input):
        next(tried)
        Path("last.txt").write_text(repr(given_input)[:100_000])  # what remains of a crash in native code
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            with limited(EXAMPLE_SECONDS):
                read(place, given_input)
        except UserError as error:
            assert str(error).strip(), "an error without words"

    example.__name__ = name
    engine.MAX_SHRINKING_SECONDS = SHRINK_SECONDS
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": set(Phase) - {Phase.explain}}
    run = settings(database=database, max_examples=50, **options)(given(given_input=inputs)(example))
    run._hypothesis_internal_database_key = b"input"  # not the source of `example`, which may change
    while time.monotonic() < end:
        run()
    sys.stdout.write(f"{name}: {next(tried):,} inputs in {seconds:.0f} s\n")


SWEEP = (
    b'{"keys":[{"key":"optim.lr","values":[0.1,0.2]}],"search":"grid","count":2,"metric":"loss","prune":"none",'
    b'"working_folder":"/","trials":[{"number":1,"settings":{"optim.lr":0.1},"state":"finished","value":0.5,"loss":0.5,'
    b'"seconds":1.5,"digest":"ab","evaluations":[{"step":1,"value":0.5,"loss":0.5}]},{"number":2,"settings":{}}]}'
)


@target(damaged(SWEEP))
def sweeps(folder, data):
    """What `sweep show` reads and draws."""
    (folder / "sweep.json").write_bytes(data)
    sweep_state.load(folder)


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", TARGETS)
def test_reader(commands, tmp_path, name):
    answer = commands.answer(session, name, SECONDS, folder=tmp_path, seconds=SECONDS + 60)
    last = tmp_path / "last.txt"
    assert answer.kind == "done", (
        f"{answer.output[-8000:]}\nlast input: {last.read_text()[:2000] if last.exists() else None}"
    )
    sys.stdout.write(answer.output)
