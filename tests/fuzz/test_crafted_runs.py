"""A run folder from somebody else: links, FIFOs and words in it lead nowhere else, and cost neither time nor memory."""

import io
import json
import os
import re
import subprocess
import sys
import time

import pytest
from rich.console import Console
from training_runs import config_in, run_on_rank

from lockstep.base import storage
from lockstep.base.errors import CheckpointError, ConfigError, LaunchError, ModelError
from lockstep.base.events import Bus
from lockstep.data import bad_samples
from lockstep.inference import trained_model
from lockstep.inference.export import space
from lockstep.launch import run_control
from lockstep.launch.elastic import failure
from lockstep.observe.report import report_page, run_files
from lockstep.observe.sinks import csv, jsonl
from lockstep.observe.watch.run_state import RunReader
from lockstep.observe.watch.screen import screen
from lockstep.protocol import run_secret
from lockstep.recipe import run_paths
from lockstep.run import api
from lockstep.tools.compare import comparison
from lockstep.training.steering import Steering

RECIPE = "data: {kind: digits}\nrun: {dir: %s, name: planted}\n"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "runs/own"
    (made / "checkpoints").mkdir(parents=True)
    (made / "recipe.yaml").write_text(RECIPE % (tmp_path / "outside"))
    return made


def test_a_run_is_where_it_lies_whatever_its_recipe_says(folder):
    (folder / "checkpoints").rename(folder / "others")
    (folder / "others/step-000000001").mkdir()
    (folder / "others/step-000000001/manifest.json").write_text("{}")
    for path in (folder, folder / "others/step-000000001"):
        assert run_paths.locate(path)[0].folder == folder


def test_a_run_does_not_write_into_another(folder, tmp_path):
    other = tmp_path / "runs/other"
    other.mkdir()
    (other / "checkpoints").symlink_to(folder / "checkpoints")
    with pytest.raises(ConfigError, match=r"other/checkpoints is a link, but a run writes to it: remove it"):
        run_paths.check_folder(other)
    (other / "checkpoints").unlink()
    (tmp_path / "disk").mkdir()
    (other / "checkpoints").symlink_to(tmp_path / "disk")  # on another disk, say
    run_paths.check_folder(other)
    (other / "logs").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="other/logs is a link"):
        run_paths.check_folder(other)


@pytest.mark.parametrize("name", ["space", "space/model"])
def test_an_export_does_not_follow_a_link_that_lies_there(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trained_model, "run_of", lambda *_: (run_paths.locate(folder)[0], folder))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path)
    with pytest.raises(ModelError, match=rf"{name} is a link, which is not followed: .* with --to"):
        trained_model.export_space(folder, None, None)


def fifo(file):
    os.mkfifo(file)


def huge(file):
    file.touch()
    os.truncate(file, 6 << 30)


def link(file):
    file.with_name("precious").write_text("a secret")
    file.symlink_to("precious")


def other_bytes(file):
    file.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("name", ["Dockerfile", "README.md", ".gitattributes"])
@pytest.mark.parametrize("made", [fifo, huge, link, other_bytes])
def test_what_lies_in_the_folder_of_a_space_is_read_with_care(tmp_path, name, made):
    made(tmp_path / name)
    with pytest.raises(ModelError, match=r"holds a file that cannot be read \(.*\): name another folder with --to"):
        space.check(tmp_path)


def test_lists_of_bad_samples_are_read_with_care(tmp_path):
    good = '{"split": "train", "sample": 3, "reason": "torn"}\n'
    bad = ['{"sample":1}', "[1]", '{"split": "train", "sample": {}}', '{"split": "x", "sample": 1}', "[" * 99999, "}"]
    bad_samples.file_of(tmp_path, 0).write_text("".join(f"{line}\n{good}" for line in bad) + '{"split": "train", "sam')
    os.mkfifo(bad_samples.file_of(tmp_path, 7))
    assert bad_samples.listed(tmp_path) == {"train": {"count": 1, "indices": [3]}}


def test_logs_do_not_follow_a_link(folder, tmp_path):
    (tmp_path / "secret").write_text("precious")
    (folder / "launch.yaml").write_text("data: {kind: digits}\n")
    (folder / "job.json").write_text('{"kind": "local", "host": "x", "process": 4000000, "began": 1.0}')
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").symlink_to(tmp_path / "secret")
    with pytest.raises(LaunchError, match=r"rank-0.log is a link, which is not followed"):
        list(run_control.log_lines(folder, 0, follow=False))


@pytest.mark.parametrize("name", ["logs", "summary.json", "metrics.jsonl", ".lock"])
def test_what_lies_in_the_way_is_told_before_training(ranks, tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).symlink_to(tmp_path / "nowhere")
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a")):
        assert re.search(rf"ConfigError: .*/a/{name} is a link, .*: remove it, or choose another run.name", message)


STARTED = '{"time":%s,"kind":"started","step":0,"total_steps":9}\n'
METRIC = '{"kind":"step","step":3,"loss":0.5,"chain":"ab"}\n'
NINES = "9" * 400
BAD_LINES = {
    "history.jsonl": [
        *(STARTED % time for time in ("1e300", "NaN", "1e15", "-1", NINES, '"1000"', "[" * 100_000)),
        STARTED.replace("started", "landed") % 1000,
        '{"time":1000,"kind":"started","step":0,"total_steps":1000000000000000000}\n',
        '{"time":1000,"kind":"started","step":0,"message":"' + "x" * (1 << 20) + '"}\n',
    ],
    "metrics.jsonl": [
        *(METRIC.replace("0.5", value) for value in ("NaN", "1e999", NINES, "9" * 5000, '"a"', "[" * 100_000)),
        *(METRIC.replace(":3", f":{step}") for step in ("-1", '"3"', "1.5", NINES, "null")),
        *('{"kind":"evaluation","loss":1}\n', '{"step":3,"loss":1}\n', "[1]\n", "\n", "\x00\n"),
    ],
}


def written(folder, **files):
    (folder / "recipe.yaml").write_text("run: {name: a}\n")
    for name, text in {"history": STARTED % 1000, "metrics": METRIC, **files}.items():
        (folder / f"{name}.jsonl").write_text(text)


def seen(folder, width=200):
    text = io.StringIO()
    Console(file=text, width=width).print(screen(RunReader(folder).state(), width=width))
    return text.getvalue()


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    counts = {name: len(lines) for name, lines in BAD_LINES.items()}
    texts = {name: "".join(lines) for name, lines in BAD_LINES.items()}
    good = {"history.jsonl": STARTED % 1000, "metrics.jsonl": METRIC}
    written(tmp_path, **{name.removesuffix(".jsonl"): good[name] + text + good[name] for name, text in texts.items()})
    notes = {name: f"{count} lines of {name} left out: cut short, too long" for name, count in counts.items()}
    page = report_page.html([run_files.read(tmp_path)])
    assert all(note in page for note in notes.values())
    assert notes["history.jsonl"] in seen(tmp_path)
    compared = comparison.compare(tmp_path, tmp_path)
    assert compared.is_equal and notes["metrics.jsonl"] in "\n".join(compared.lines)
    with pytest.warns(UserWarning, match=notes["metrics.jsonl"]):
        assert [line["step"] for line in api.Run(tmp_path).metrics] == [3, 3]
    jsonl.Jsonl(tmp_path)._drop_after(2)
    assert METRIC not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "body",
    [
        {"labels": ["a", "b"], "confusion_matrix": [[1, 2, 3]] * 2},
        {"labels": ["a"] * 40, "confusion_matrix": [[1] * 60] * 40},
        {"labels": ["a"], "confusion_matrix": [[-1]]},
        {"steps": 10**400},
        {"steps": "\x1b[31m"},
        {"epochs": float("nan")},
        {"evaluation": {"x" * 300: 1.0}},
        [],
    ],
)
def test_a_summary_that_nobody_wrote_is_noted(tmp_path, body):
    written(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "finished", **body} if body else body))
    page = report_page.html([run_files.read(tmp_path)])
    assert "summary.json cannot be read: " in page and "\x1b" not in page
    with pytest.raises(ConfigError, match=r"cannot be read: summary.json cannot be read: "):
        comparison.compare(tmp_path, tmp_path)


def test_of_many_classes_the_most_frequent_confusions_are_listed(tmp_path):
    written(tmp_path)
    counts = [[0] * 40 for _ in range(40)]
    counts[3][5] = 17
    body = {"status": "finished", "labels": [f"<{n}>" for n in range(40)], "confusion_matrix": counts}
    (tmp_path / "summary.json").write_text(json.dumps(body))
    page = report_page.html([run_files.read(tmp_path)])
    assert "<bdi>17</bdi></td><td><bdi>&lt;3&gt;</bdi></td><td><bdi>&lt;5&gt;</bdi></td>" in page


MANY = """
import sys
from pathlib import Path
from lockstep.observe.report import report_page, run_files
from lockstep.observe.watch.run_state import RunReader
folder = Path(sys.argv[1])
page = report_page.html([run_files.read(folder)])
assert len(page) < 1_000_000, len(page)
RunReader(folder).state()
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10)
"""


def test_many_starts_and_a_huge_line_cost_little(tmp_path):
    """In another process, for its peak memory in MiB; importing alone takes 200."""
    written(tmp_path, history=STARTED % 1000 * 100_000, metrics=METRIC + "x" * (200 << 20) + "\n" + METRIC)
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and int(done.stdout) < 450, done


def test_watching_keeps_the_newest_start_of_many_lines(tmp_path):
    saved = '{"time":1001,"kind":"saved","step":1,"seconds":1}\n'
    written(tmp_path, history=STARTED % 1000 + 30_000 * saved)
    reader = RunReader(tmp_path)
    assert len(reader.state().start.lines) <= 20_001 and reader.state().start.first_step == 0


def endless(file):
    file.symlink_to("/dev/zero")


def sparse(file):
    file.touch()
    os.truncate(file, 1 << 42)


@pytest.mark.parametrize("made", [fifo, endless, sparse, link])
def test_what_has_no_end_in_place_of_a_file_of_a_run(tmp_path, made):
    """Each is answered at once: the readers are called one after the other, in this process."""
    begun = time.monotonic()
    written(tmp_path)
    names = ["history.jsonl", "metrics.jsonl", "summary.json", "evaluation.json"]
    names += ["steering.jsonl", "job.json", "verdict.json", "rank-1.log", ".secret", "metrics.csv"]
    for name in names:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / "precious").unlink(missing_ok=True)
        made(tmp_path / name)
    (tmp_path / "precious").write_text(METRIC.replace("ab", "secret"))
    page = report_page.html([run_files.read(tmp_path)])
    assert all(f"{name} cannot be read: it " in page for name in names[:4]) and "secret" not in page
    with pytest.raises(ConfigError, match=r"history.jsonl cannot be read: it "):
        RunReader(tmp_path).state()
    with pytest.raises(OSError, match="it is a|it has"):
        jsonl.Jsonl(tmp_path)._drop_after(3)
    with pytest.raises(ConfigError, match=r"job.json cannot be used"):
        run_control.status(tmp_path)
    if made is not link:
        with pytest.raises(OSError, match="it is a|it has"):
            csv.Csv(tmp_path)._drop_after(3)
        with pytest.raises(CheckpointError, match=r"steering.jsonl.* cannot be read"):
            Steering(Bus(), tmp_path / "steering.jsonl").start(1, repeats=True)
        assert failure._watchdog_report(tmp_path) == [] and len(storage.tail(tmp_path / "rank-1.log")) <= 1 << 16
    with pytest.raises(OSError, match=r"it is a|it has|damaged"):
        run_secret.read(tmp_path)
    assert time.monotonic() - begun < 20


def test_a_report_does_not_follow_links_out_of_the_run(tmp_path):
    (tmp_path / "credentials").write_text("section: {key: precious}\n")
    (tmp_path / "recipe.yaml").symlink_to("credentials")
    with pytest.raises(ConfigError, match=r"recipe.yaml is a link, which is not followed"):
        run_files.read(tmp_path)
    (tmp_path / "recipe.yaml").unlink()
    written(tmp_path)
    sample = {"origin": "a", "label": "b", "predicted": "c", "confidence": 0.5, "loss": 1.0}
    for image in ("/etc/passwd", "file:///etc/passwd", "https://example.org/a.png"):
        (tmp_path / "evaluation.json").write_text(json.dumps({"worst": [{**sample, "image": image}]}))
        page = report_page.html([run_files.read(tmp_path)])
        assert image not in page and "evaluation.json cannot be read" in page
