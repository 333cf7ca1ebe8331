"""`lockstep scale` on real processes: its table, JSON and picture, and what it refuses."""

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner
from warmed import warm_launchers

from lockstep.cli import _app
from lockstep.tools.scale.scaling import ScaleRow

CONFIG = """
data:  {kind: digits}
model: {kind: cnn}
train: {epochs: 1, global_batch: 64, micro_batch: 32, stop_metric: loss}
parallel: {kind: KIND}
schedule: {warmup: 100}
evaluate: {every_steps: 1}
checkpoint: {every_steps: 1, best: accuracy}
"""


@pytest.fixture
def scale(tmp_path, monkeypatch):
    """Call the command on a config -> (exit code, output)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, kind="ddp"):
        (tmp_path / "c.yaml").write_text(CONFIG.replace("KIND", kind))
        with warm_launchers():
            result = CliRunner().invoke(_app.app, ["scale", "c.yaml", *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout + result.stderr

    return call


def row(processes, rates, base, **changed):
    given = {"global_batch": 64, "base_rates": base, "base_processes": 1, "peak_bytes": 0, **changed}
    return ScaleRow(processes=processes, rates=rates, **given)


@pytest.mark.parametrize("weak", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_both_kinds_of_scaling_are_measured(scale, tmp_path, weak):
    options = ["--world", "2,1", "--steps", "8", "--rounds", "2", "--picture", "s.svg", "--json", "s.json"]
    code, output = scale(*options, *(["--weak"] if weak else []))
    assert code == 0, output
    assert "round 2: 2 processes" in output and ("Weak scaling" if weak else "Strong scaling") in output
    one, two = json.loads((tmp_path / "s.json").read_text())
    assert (one["processes"], two["processes"]) == (1, 2)
    assert (one["global_batch"], two["global_batch"]) == (64, 128 if weak else 64)
    assert len(two["rates"]) == len(two["base_rates"]) == 2 and min(two["rates"]) > 0
    assert two["peak_bytes"] > 2**27
    picture = "".join(ElementTree.fromstring((tmp_path / "s.svg").read_text()).itertext())
    assert "samples per second" in picture and "100%" in picture
    assert {path.name for path in tmp_path.iterdir()} == {"c.yaml", "s.svg", "s.json"}  # no run is left


def test_ratios_are_taken_within_a_round():
    base = (100.0, 50.0, 100.0)
    two = row(2, (180.0, 90.0, 150.0), base)
    assert (two.rate, two.speed_up, two.efficiency) == (150.0, 1.8, 0.9)
    assert row(8, (300.0,), (100.0,), base_processes=4).efficiency == 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "1,4"], "--world 4: a step has only 2 micro-batches to share out"),
        (["--world", "two"], "--world two: give numbers of processes"),
        (["--picture", "s.png"], "let its name end in .svg"),
        (["--json", "none/s.json"], "name another folder"),
        (["--steps", "0"], "Invalid value for '--steps'"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(scale, arguments, message):
    code, output = scale(*arguments)
    assert code == 2 and message in " ".join(output.split()) and "round" not in output


def test_a_strategy_for_one_process_is_not_scaled(scale):
    code, output = scale("--world", "1,2", kind="single")
    assert code == 2 and "set another, such as parallel.kind=ddp" in output


def test_a_run_that_fails_shows_its_output(scale):
    code, output = scale("--world", "1", "--steps", "1", "data.kind=user", "data.file=missing.py")
    assert code != 0 and "missing.py" in output and "Traceback" not in output
