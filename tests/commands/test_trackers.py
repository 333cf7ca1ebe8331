"""Sinks for experiment trackers, with the real packages and no network: one tracker run over kills and resumes."""

import json
import os
import sys

import pytest
from observed_events import ended
from observed_events import run as observe
from observed_events import started as run_started
from running import lockstep, started, summary, wait_for_steps, workers

from lockstep.base import plugins
from lockstep.base.errors import ConfigError
from lockstep.base.events import Bus, Warned
from lockstep.core.host.phases import OF_STEPS
from lockstep.observe.sinks import mlflow

CONFIG = """
data: {kind: digits, limit: 400}
train: {steps: 60, global_batch: 32, micro_batch: 8}
launch: {processes: 2, max_restarts: 0}
observe: {log_every: 2}
checkpoint: {every_steps: 10}
"""
PHASED = dict.fromkeys(OF_STEPS, [0.1, 0.4])
OFFLINE = {"WANDB_MODE": "offline"}
SLOW = """
import time


class Slow:
    def notice(self, event):
        time.sleep(0.01)

    def close(self):
        pass


def observers(options):
    return [Slow()]
"""


def leveldb_records(data):
    """The records of a log file in LevelDB's format: blocks of 32 KiB, chunks with checksum, length and type."""
    place, record = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield record
            record = b""


def wandb_rows(folder):
    """Rows by step, config and summary of all offline parts of a run, in their order; and the ids of these."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config, final, ids = [], {}, {}, set()
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in map(Record.FromString, leveldb_records(file.read_bytes())):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    rows.append((record.history.step.num, name, json.loads(item.value_json)))
            final |= {(item.key or "/".join(item.nested_key)): item.value_json for item in record.summary.update}
    return rows, config, final, ids


def mlflow_rows(folder):
    """The same of MLflow's folder of runs."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder.parent / "mlruns").absolute().as_uri())
    found = client.search_runs([client.get_experiment_by_name("lockstep").experiment_id])
    (run,) = [run for run in found if run.info.run_name == folder.name]
    rows = [
        (metric.step, name, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
    artifacts = {each.path for each in client.list_artifacts(run.info.run_id)}
    return rows, run.data.params, run.data.tags | {"run status": run.info.status}, artifacts


def mlflow_rows_of(sink):
    run = sink.client.get_run(sink.id)
    return [
        (m.step, m.key, m.value) for name in run.data.metrics for m in sink.client.get_metric_history(sink.id, name)
    ]


def losses(rows, name="train/loss"):
    return [(step, value) for step, each, value in rows if each == name]


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    """Those that the sinks would set, so that they do not stay; and none of the user's."""
    for name, value in {**mlflow.DEFAULTS, "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that was killed and resumed."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "slow.py").write_text(SLOW)
    (folder / "c.yaml").write_text(CONFIG)
    settings = ["run.name=a", "observe.sinks=[jsonl,wandb,mlflow]", "observe.file=slow.py"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        process = started(folder, "train", "c.yaml", *settings)
        wait_for_steps(folder / "runs" / "a", 15)
        workers(process)[0].kill()
        process.communicate(timeout=60)
        done = lockstep(folder, "train", "c.yaml", *settings)
    assert done.returncode == 0, done.stderr
    assert "ended, since your code has started" not in done.stderr
    return folder / "runs" / "a"


def logged(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def times(folder):
    """Of history.jsonl: step -> milliseconds of the forward pass; of a step that was done again, the last."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return {
        line["step"]: 1000 * max(line["phases"]["forward"]) / line["steps"] for line in lines if line["kind"] == "ranks"
    }


def test_wandb_has_each_step_once(killed):
    rows, config, final, ids = wandb_rows(killed)
    found = losses(rows)[-len(logged(killed)) :]  # a part that a kill has ended may hold some of these as well
    assert found == logged(killed)
    assert set(losses(rows)) == set(found)
    timed = sorted(times(killed).items())
    assert losses(rows, "time/forward")[-len(timed) :] == [(step, pytest.approx(ms, abs=0.01)) for step, ms in timed]
    assert len(ids) == 1
    assert config["train"]["global_batch"] == 32 and config["world_size"] == 2
    assert json.loads(final["digest"]) == summary(killed.parents[1], "a")["digest"]
    assert json.loads(final["status"]) == "finished"


def test_mlflow_has_each_step_once(killed):
    rows, parameters, tags, artifacts = mlflow_rows(killed)
    assert losses(rows) == [(step, pytest.approx(loss)) for step, loss in logged(killed)]
    assert [step for step, _ in losses(rows, "time/forward")] == sorted(times(killed))
    assert len(losses(rows, "test/accuracy")) == len({step for step, _ in losses(rows, "test/accuracy")})
    assert parameters["train.global_batch"] == "32"
    assert tags["digest"] == summary(killed.parents[1], "a")["digest"]
    assert tags["run status"] == "FINISHED"
    assert artifacts >= {"recipe.yaml", "summary.json", "metrics.jsonl"}


def test_a_tracker_that_is_down_does_not_stop_the_run(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    address = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    settings = ["run.name=a", "train.steps=10", "observe.sinks=[progress,jsonl,mlflow]"]
    done = lockstep(tmp_path, "train", "c.yaml", *settings, env={**os.environ, **address})
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.count("the observer lockstep.observe.sinks.mlflow.Mlflow failed and is left out from here on") == 1
    assert summary(tmp_path, "a")["status"] == "finished"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"{name}, which is not installed: pip install 'lockstep-train\[{name}\]'"):
        plugins.find("observe.sinks", name).build(tmp_path)


def test_a_run_from_the_beginning_is_another_run(tmp_path):
    """And the record of a run that was cut short is no hindrance."""
    folder, ids = tmp_path / "r", []
    folder.mkdir()
    for resumed_step, torn in ((0, ""), (0, "[12"), (10, "[20, ")):
        sink = plugins.find("observe.sinks", "mlflow").build(folder)
        observe(sink, folder, range(resumed_step + 1, 21), resumed_step)
        sink.notice(ended(folder))
        ids.append(sink.id)
        with (folder / "mlflow.jsonl").open("a") as file:
            file.write(torn)
    assert len(set(ids)) == 2 and ids[1] == ids[2]


def test_values_of_variables_are_not_sent(tmp_path):
    """Nor the file that holds them; a token may be among them."""
    folder = tmp_path / "trial"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("launch: {environment: {HF_TOKEN: hf_secret}}\n")
    (folder / "metrics.jsonl").touch()
    sink = plugins.find("observe.sinks", "mlflow").build(folder)
    observe(sink, folder, range(1, 3))
    sink.notice(ended(folder))
    _, parameters, _, artifacts = mlflow_rows(folder)
    assert parameters["launch.environment.HF_TOKEN"] == "***" and artifacts == {"metrics.jsonl"}
    sent = [file for file in (tmp_path / "mlruns").rglob("*") if file.is_file()]
    assert not [file for file in sent if b"hf_secret" in file.read_bytes()]


def test_times_that_a_kill_has_kept_are_sent_from_the_history(tmp_path):
    """Those up to the resumed step; of lines that nobody has written so, none."""
    lines = [{"time": 1000.0, "kind": "ranks", "step": step, "steps": 2, "phases": PHASED} for step in (2, 4, 6)]
    lines[1]["gpus"] = {"celsius": [50.0, 70.0]}
    odd = [{**lines[0], "step": 5, "phases": {}}, {**lines[0], "step": 3, "steps": 0}, {"kind": "ranks", "step": 1}]
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *odd]) + '{"kind": "ra')
    sink = plugins.find("observe.sinks", "mlflow").build(folder)
    sink.notice(run_started(folder, resumed_step=5))
    rows = mlflow_rows_of(sink)
    assert losses(rows, "time/exchange") == [(2, 200.0), (4, 200.0)]
    assert losses(rows, "gpu/most_celsius") == [(4, 70.0)]


def test_errors_are_reported_once(tmp_path):
    """An error while logging leaves the tracker out."""
    found = []

    class Keeps:
        def notice(self, event):
            found.extend([event.message] if isinstance(event, Warned) else [])

        def close(self):
            pass

    bus, sink = Bus(), plugins.find("observe.sinks", "mlflow").build(tmp_path)
    bus.subscribe(sink)
    bus.subscribe(Keeps())
    bus.publish(run_started(tmp_path))
    sink.log = None
    observe(bus_of(bus), tmp_path, range(1, 5))
    assert len(found) == 1 and "Mlflow failed and is left out" in found[0]


def bus_of(bus):
    class Publishes:
        notice = staticmethod(bus.publish)

    return Publishes
