"""The benchmarks run; what they measure here says nothing."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from exporting import text_case
from places import ROOT

BENCHMARKS = ROOT / "benchmarks"
FP32 = ["--precision", "fp32"]
"""Products in bf16 take up to 70 times as long as in fp32 on a processor without instructions for them."""
SMALL = {
    "checkpoint_stall": ["--models", "encoder", "--worlds", "1", "--pairs", "2", *FP32],
    "estimate": ["--models", "cnn", "--strategies", "ddp", "--worlds", "1", "--rounds", "1", "--root", "DATA"],
    "language_model": ["--rounds", "1", "--steps", "12"],
    "recheck": ["--works", "cnn-64", "--worlds", "2", "--rounds", "1", "--steps", "40"],
    "recovery": ["--faults", "1", "--rounds", "1", "--pairs", "1", "--seconds", "1"],
    "reproducibility": ["--models", "cnn", "--worlds", "2", "--networks", "loopback", "--seconds", "0.2", *FP32],
    "scale_on_paper": [],
    "serving": ["EXPORT", "--seconds", "0.2", "--repetitions", "1"],
    "strategies": ["--rounds", "1", "--seconds", "0.2", *FP32],
}
"""Arguments for a benchmark's smallest work."""
APART = {"compare", "gpu", "observing", "stages", "to_accuracy"}
"""Benchmarks with tests of their own."""


def test_all_benchmarks_can_be_imported():
    """Names that they use may be moved in the package."""
    files = {file.stem for file in BENCHMARKS.glob("*.py") if "__main__" in file.read_text()}
    assert files == SMALL.keys() | APART
    program = "import runpy, sys; [runpy.run_path(name) for name in sys.argv[1:]]"
    environment = os.environ | {"PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{BENCHMARKS / 'peers'}"}
    line = [sys.executable, "-c", program, *sorted(map(str, BENCHMARKS.glob("*.py")))]
    done = subprocess.run(line, cwd=BENCHMARKS, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name, data_folder, minilm, tmp_path):
    if name == "serving":
        text_case(tmp_path / "base", minilm).export(tmp_path / "EXPORT")
    given = [str(data_folder) if word == "DATA" else word for word in SMALL[name]]
    command = [sys.executable, BENCHMARKS / f"{name}.py", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    figures = re.findall(r"\d+\.\d", done.stdout)
    assert done.returncode == 0 and len(figures) > 3, done.stdout + done.stderr


def test_energy_is_that_of_the_processors(tmp_path):
    """Their meters start again at zero; a processor's parts are in its own meter already."""
    path = [str(BENCHMARKS), str(BENCHMARKS / "peers")]
    for name, start in (("intel-rapl:0", 999_000_000), ("intel-rapl:1", 5), ("intel-rapl:0:0", 7), ("other", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{start}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("999999999\n")
    program = f"""
import sys
sys.path[:0] = {path}
from pathlib import Path
import compare
folder = Path({str(tmp_path)!r})
before = compare.energy_meters(folder)
(folder / "intel-rapl:0" / "energy_uj").write_text("1000000")
(folder / "intel-rapl:1" / "energy_uj").write_text("3000005")
print(compare.joules_since(before, folder), compare.joules_since({{}}, folder))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["5.0", "nan"], done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("work", ["mnist-512", "minilm-128", "gpt-16"])
def test_lockstep_and_the_tuned_loop_train_side_by_side(work, shared_data, minilm, tmp_path):
    where = ["--data", shared_data, "--model", minilm, "--peers", Path(sys.executable).parent]
    small = ["--works", work, "--contenders", "Lockstep fast", "--rounds", "1", "--at-least", "1000", *FP32]
    command = [sys.executable, BENCHMARKS / "compare.py", *where, *small, "--out", tmp_path / "table.md"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 1 and "of the tuned loop, not 1000.00" in done.stderr, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert f"### {work}" in table and "| Lockstep fast |" in table and "| tuned loop |" in table


@pytest.mark.matrix
def test_both_reach_an_accuracy(shared_data, tmp_path):
    small = ["--target", "0.5", "--every", "20", "--rounds", "1", "--peers", Path(sys.executable).parent, *FP32]
    command = [sys.executable, BENCHMARKS / "to_accuracy.py", "--data", shared_data, *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "| tuned loop |" in done.stdout and "| Lockstep exact |" in done.stdout


@pytest.mark.matrix
def test_stages_are_measured(shared_data, tmp_path):
    small = ["--data", shared_data, "--rounds", "1", "--steps", "6", "--out", tmp_path / "stages.md", *FP32]
    command = [sys.executable, BENCHMARKS / "stages.py", *small]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "stages.md").read_text().splitlines()
    _, *rows = [line.split(" | ") for line in lines if line.startswith("| ")]
    assert len(rows) == 6
    assert rows[1][1] == "needs GPUs"
    assert all(float(cell.strip(" |")) > 0 for row in [rows[0], *rows[2:]] for cell in row[1:])


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_what_observing_costs_is_measured(shared_data, tmp_path):
    small = ["--data", shared_data, "--works", "cnn-512", "--rounds", "1", *FP32]
    command = [sys.executable, BENCHMARKS / "observing.py", *small]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.strip().splitlines()
    figures = [float(cell.split()[0].rstrip("%")) for cell in last.strip("| ").split("|")[1:3]]
    assert last.startswith("| cnn-512 |") and last.endswith("% |") and min(figures) > 0


def test_a_profile_tells_how_busy_the_gpu_is(tmp_path):
    """Work that overlaps counts once; five steps are in a trace."""
    work = [("kernel", 0, 10), ("gpu_memcpy", 5, 10), ("kernel", 30, 10), ("cpu_op", 0, 99)]
    events = [{"ph": "X", "cat": cat, "name": cat, "ts": ts, "dur": dur} for cat, ts, dur in work]
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1}
    (tmp_path / "t.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events + 10 * [launch]}).encode()))
    program = f"import gpu, pathlib; print(gpu.of_profile(pathlib.Path({str(tmp_path / 't.gz')!r})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "{'busy': 0.625, 'launches': 2.0}", done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_contenders_on_a_gpu_are_tried_on_the_cpu(tmp_path):
    """What is not installed, and what has no time left, is named."""
    small = [
        "--tiny",
        "--device",
        "cpu",
        "--seconds",
        "120",
        "--contenders",
        "tuned loop",
        "Lockstep exact",
        "Lightning",
    ]
    command = [sys.executable, BENCHMARKS / "gpu.py", *small, "--out", tmp_path / "table.md"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text()
    assert table.count("| tuned loop |") == table.count("| Lockstep exact |") == table.count("| Lightning |") == 3
    assert "failed" not in table


def test_results_name_the_commit_at_which_they_were_measured():
    for file in (BENCHMARKS / "results").glob("*.md"):
        assert re.search(r"commit [0-9a-f]{7}", file.read_text()), file
    for file in BENCHMARKS.glob("*.py"):
        assert ("__main__" in file.read_text()) == ("from measured_at import" in file.read_text()), file
