"""What watches a run writes down the truth: no line and no point lost or repeated, over kills and resumes."""

import csv
import io
import json
import os
from types import SimpleNamespace

import pytest
from observed_events import ended, evaluated, points, run, started, step
from pydantic import ValidationError

from lockstep.base import plugins
from lockstep.base.events import (
    Bus,
    CheckpointSaved,
    EpochDone,
    RankTimes,
    SaveStarted,
    StepDone,
    Warned,
)
from lockstep.core.host.phases import PHASES
from lockstep.observe import meters
from lockstep.observe.observe_config import ObserveSection
from lockstep.observe.sinks import csv as csv_sink
from lockstep.observe.sinks import jsonl, tensorboard


def lines_of(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


# ---- metrics.jsonl


def test_jsonl_has_a_line_per_logged_step_and_evaluation(tmp_path):
    sink = jsonl.build(tmp_path)
    sink.notice(started(tmp_path))
    logged = StepDone(step=2, epoch=1, values={"loss": 0.5, "accuracy": 0.25}, chain="0123456789abcdef")
    for event in (step(1), logged, evaluated(5), EpochDone(epoch=1, step=5)):
        sink.notice(event)
    for event in (
        Warned(message="x"),
        CheckpointSaved(step=5, folder=tmp_path / "s", seconds=1.0, stall_seconds=0.25),
        ended(tmp_path),
    ):
        sink.notice(event)
    sink.close()
    assert [json.loads(line) for line in lines_of(tmp_path)] == [
        {"kind": "step", "step": 2, "epoch": 1, "loss": 0.5, "accuracy": 0.25, "chain": "0123456789abcdef"},
        {"kind": "evaluation", "step": 5, "epoch": 1, "samples": 200, "accuracy": 0.05, "loss": 0.5},
    ]


@pytest.mark.parametrize("killed_at", [1, 4, 7, 10, 12])
@pytest.mark.parametrize("resumed_step", [0, 5, 10])
@pytest.mark.parametrize(
    "torn", ["", '{"kind": "step", "st', '{"kind": "step", "step": 99', "\0\0\0\0", "12", "\udcff\udcfe"]
)
def test_jsonl_after_a_kill_equals_an_uninterrupted_run(tmp_path, killed_at, resumed_step, torn):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(jsonl.build(whole), whole, range(1, 21))
    last = max(killed_at, resumed_step)
    run(jsonl.build(killed), killed, range(1, last + 1))
    with (killed / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write(torn)
    run(jsonl.build(killed), killed, range(resumed_step + 1, 21), resumed_step)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("killed_at", [4, 7, 12])
@pytest.mark.parametrize("resumed_step", [0, 5, 10])
@pytest.mark.parametrize("torn", ["", "step,1", "step,99,3,0.1,0.1", "\0\0", '"step'])
def test_csv_after_a_kill_equals_an_uninterrupted_run(tmp_path, killed_at, resumed_step, torn):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run(csv_sink.build(whole), whole, range(1, 21))
    last = max(killed_at, resumed_step)
    run(csv_sink.build(killed), killed, range(1, last + 1))
    with (killed / "metrics.csv").open("a") as file:
        file.write(torn)
    run(csv_sink.build(killed), killed, range(resumed_step + 1, 21), resumed_step)
    assert (killed / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    rows = list(csv.DictReader(io.StringIO((whole / "metrics.csv").read_text())))
    assert [int(row["step"]) for row in rows if row["kind"] == "step"] == list(range(1, 21))
    assert rows[5] == {
        **{"kind": "evaluation", "step": "5", "epoch": "1", "loss": "", "learning_rate": ""},
        **{"test_accuracy": "0.05", "test_loss": "0.5"},
    }


def test_jsonl_keeps_what_a_full_disk_refuses_until_there_is_room(tmp_path):
    resource = pytest.importorskip("resource")
    sink, before = jsonl.build(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    run(sink, tmp_path, range(1, 4))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, before[1]))
    try:
        for number in (4, 5):
            sink.notice(step(number, loss=1.0))
        assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sink.notice(step(6, loss=1.0))
    assert [json.loads(line)["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_jsonl_keeps_earlier_lines_byte_for_byte(tmp_path):
    """Also those that another version has written in another way."""
    own = '{"step":3,"kind":"step","loss":1e-3}\n{ "kind": "note", "step": 4, "text": "caf\u00e9 \u2028 end" }\n'
    (tmp_path / "metrics.jsonl").write_bytes((own + '{"kind": "step", "step": 6}\n').encode())
    jsonl.build(tmp_path).notice(started(tmp_path, resumed_step=5))
    assert (tmp_path / "metrics.jsonl").read_bytes() == own.encode()


# ---- TensorBoard


def test_tensorboard_has_the_ranks_the_config_and_the_end(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "recipe.yaml").write_text("train: {steps: 20}\nlaunch: {environment: {HF_TOKEN: hf_secret}}\n")
    sink = tensorboard.build(tmp_path)
    run(sink, tmp_path, range(1, 11))
    seconds = {**dict.fromkeys(PHASES, (0.0, 0.0)), "forward": (0.1, 0.3), "exchange": (0.2, 0.0)}
    facts = {"delayed_seconds": (0.0, 0.0), "micro_batches": (1, 1), "memory_bytes": (10**9, 2 * 10**9)}
    sink.notice(RankTimes(step=10, steps=10, seconds=seconds, gpus={"celsius": (50.0, 70.0)}, **facts))
    sink.notice(ended(tmp_path))
    sink.close()
    assert points(tmp_path, "time/forward") == [(10, 20.0)]
    assert points(tmp_path, "time/waits_most") == [(10, 20.0)]
    assert points(tmp_path, "memory/most_gigabytes") == [(10, 2.0)]
    assert points(tmp_path, "gpu/celsius") == [(10, 60.0)]
    assert points(tmp_path, "gpu/most_celsius") == [(10, 70.0)]
    assert points(tmp_path, "train/epoch")[-1] == (10, 2.0)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    texts = {
        tag: accumulator.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in accumulator.Tags()["tensors"]
    }
    text = "train:\n  steps: 20\nlaunch:\n  environment:\n    HF_TOKEN: '***'\n"
    assert texts["config/text_summary"] == tensorboard.as_code(text)
    assert '"digest": "0123456789abcdef' in texts["end/text_summary"]


def test_tensorboard_has_train_and_test_scalars(tmp_path):
    sink = tensorboard.build(tmp_path)
    run(sink, tmp_path, range(1, 21))
    sink.notice(step(21))
    sink.close()
    assert points(tmp_path, "train/loss") == [(number, 1 / number) for number in range(1, 21)]
    assert points(tmp_path, "train/learning_rate") == [(number, 0.1) for number in range(1, 21)]
    assert points(tmp_path, "test/accuracy") == [(number, number / 100) for number in (5, 10, 15, 20)]


def long_ago(folder):
    """Rename the one event file: TensorBoard reads files in the order of their names, which hold the second."""
    [file] = (path for path in (folder / "tensorboard").iterdir() if path.suffix != ".hparams")
    return file.rename(file.with_name(f"events.out.tfevents.0000000001.{file.name.split('.', 4)[4]}"))


@pytest.mark.parametrize(("killed_at", "resumed_step"), [(3, 0), (10, 10), (13, 10), (14, 5), (20, 15)])
@pytest.mark.parametrize("torn_bytes", [0, 7])
def test_a_resumed_tensorboard_repeats_and_misses_no_step(tmp_path, killed_at, resumed_step, torn_bytes):
    """Killed, perhaps in the middle of a record, at one step and resumed after an earlier one, or from the start."""
    first = tensorboard.build(tmp_path)
    run(first, tmp_path, range(1, killed_at + 1))
    first.close()
    file = long_ago(tmp_path)
    if torn_bytes and killed_at > resumed_step:
        os.truncate(file, file.stat().st_size - torn_bytes)
    second = tensorboard.build(tmp_path)
    run(second, tmp_path, range(resumed_step + 1, 21), resumed_step)
    second.close()
    assert points(tmp_path, "train/loss") == [(number, 1 / number) for number in range(1, 21)]
    assert points(tmp_path, "test/accuracy") == [(number, number / 100) for number in (5, 10, 15, 20)]


def hyperparameters_of(folder):
    """Of the page HPARAMS: names of settings in their order, the metrics' scalars, the settings, whether it ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    found = {
        tag: HParamsPluginData.FromString(metadata.plugin_data.content)
        for tag, metadata in accumulator.summary_metadata.items()
        if metadata.plugin_data.plugin_name == "hparams"
    }
    experiment, values = found["_hparams_/experiment"].experiment, found["_hparams_/session_start_info"]
    settings = {k: v.number_value or v.string_value for k, v in values.session_start_info.hparams.items()}
    first = [info.name for info in experiment.hparam_infos if info.differs]
    return first, [m.name.tag for m in experiment.metric_infos], settings, "_hparams_/session_end_info" in found


def test_tensorboard_shows_hyperparameters_with_the_runs_last_metrics(tmp_path):
    """Also after a resume with another setting: those of the end, in the one folder."""
    sections = "run: {seed: 3, name: x}\nmodel: {kind: cnn}\nobserve: {log_every: 1}\n"
    for steps, start, rate in ((10, 0, 0.1), (20, 10, 0.2)):
        train = f"train: {{steps: {steps}, ema: null, compile: false, sizes: [1, 2]}}\n"
        (tmp_path / "recipe.yaml").write_text(f"{sections}{train}optim: {{lr: {rate}}}\n")
        sink = tensorboard.build(tmp_path)
        run(sink, tmp_path, range(start + 1, steps + 1), start)
        sink.notice(ended(tmp_path))
        sink.close()
        if not start:
            long_ago(tmp_path)
    first, metrics, settings, has_ended = hyperparameters_of(tmp_path)
    assert settings == {
        **{"run.seed": 3, "model.kind": "cnn", "train.steps": 20, "train.compile": "false", "train.sizes": "[1, 2]"},
        **{"optim.lr": 0.2, "world_size": 2},
    }
    assert first == ["model.kind", "optim.lr"] and has_ended
    assert metrics == ["test/accuracy", "train/loss"]
    assert [points(tmp_path, tag)[-1] for tag in metrics] == [(20, 0.2), (20, 0.05)]
    assert all(path.is_file() for path in (tmp_path / "tensorboard").iterdir())
    assert len(list((tmp_path / "tensorboard").glob("*.hparams"))) == 1


def test_tensorboard_is_on_disk_when_a_checkpoint_is(tmp_path):
    """What a resume relies on must not wait in memory for a kill: it is there before the save begins."""
    sink = tensorboard.build(tmp_path)
    sink.notice(started(tmp_path))
    [file] = (tmp_path / "tensorboard").iterdir()
    for number in range(1, 201):
        sink.notice(step(number, loss=1.0))
    sink.notice(SaveStarted(step=200))
    size = file.stat().st_size
    sink.close()
    assert file.stat().st_size == size
    assert len(points(tmp_path, "train/loss")) == 200


def test_closing_before_the_start_is_harmless(tmp_path):
    for name in plugins.names("observe.sinks"):
        plugins.find("observe.sinks", name).build(tmp_path).close()


# ---- speed


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_speed_leaves_out_warm_up_and_pauses(clock):
    meter = meters.Throughput()
    assert meter.steady is None
    meter.pause()  # a pause before the first look is warm-up anyway
    clock.seconds += 50
    meter.resume()
    assert meter.look(64) is None
    assert meter.steady is None
    clock.seconds += 2
    assert meter.look(264) == pytest.approx(100)
    clock.seconds += 1
    meter.pause()
    clock.seconds += 1000
    meter.resume()
    clock.seconds += 3
    assert meter.look(464) == pytest.approx(50)
    assert meter.steady == pytest.approx(400 / 6)


def test_speed_of_a_resumed_run_counts_its_own_samples(clock):
    meter = meters.Throughput()
    meter.look(1_000_000)
    clock.seconds += 10
    assert meter.look(1_000_500) == meter.steady == pytest.approx(50)


def test_speed_when_no_time_has_passed(clock):
    meter = meters.Throughput()
    meter.look(0)
    assert meter.look(10) > 0


# ---- choosing


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (
            "tensorbord",
            "there is no sink 'tensorbord' — did you mean 'tensorboard'? (there is: csv, jsonl, mlflow, progress, tensorboard, wandb)",
        ),
        ("zzz", "there is no sink 'zzz' (there is: csv, jsonl, mlflow, progress, tensorboard, wandb)"),
    ],
)
def test_an_unknown_sink_is_refused_with_what_there_is(sink, message):
    with pytest.raises(ValidationError) as caught:
        ObserveSection(sinks=("progress", sink))
    assert message in str(caught.value)


def test_the_bus_tells_everybody_in_order_and_closes_once():
    heard = []

    class Ear:
        def __init__(self, name):
            self.name = name

        def notice(self, event):
            heard.append((self.name, event))

        def close(self):
            heard.append((self.name, "closed"))

    bus = Bus()
    for name in "ab":
        bus.subscribe(Ear(name))
    bus.publish(1)
    bus.close()
    bus.close()
    assert sorted(heard[2:]) == [("a", "closed"), ("b", "closed")]
    assert heard[:2] == [("a", 1), ("b", 1)]
