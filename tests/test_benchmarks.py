"""The benchmarks run; what they measure here says nothing."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_models_of_the_benchmarks_train(tmp_path):
    small = ["--models", "cnn", "--worlds", "2", "--networks", "loopback", "--seconds", "0.2"]
    command = [sys.executable, BENCHMARKS / "reproducibility.py", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "| cnn | 2, loopback |" in done.stdout, done.stderr
