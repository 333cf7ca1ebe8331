"""train.compile; that its bits are those of any number of processes is in test_strategies.py (make test-matrix)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "train.compile: on a CPU torch.compile needs a C++ compiler; install g++"),
        (["parallel.kind=pipeline"], "train.compile: blocks are not compiled where processes share a model"),
        (["parallel.kind=tensor"], "train.compile: blocks are not compiled where processes share a model"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(tmp_path, settings, message):
    """Without any compiler on the path."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\ntrain: {compile: true, steps: 2}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", "launch.processes=2", *settings]
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(message) == 1
