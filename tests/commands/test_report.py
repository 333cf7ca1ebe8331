"""`lockstep report`: what happened to a run, where its time went, and pages that say so whatever the files hold."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
from running import LONG, SHORT, lockstep, started, wait_for_steps, workers

from lockstep.observe.report.charts import MOST_POINTS, shortened
from lockstep.observe.report.goodput import goodput, starts
from lockstep.observe.report.report_page import COLOURS, html
from lockstep.observe.report.run_files import HistoryLine, LoggedCurve, read
from lockstep.observe.report.timeline import timeline
from lockstep.observe.run_history import RunHistory

CONFIG = "data: {kind: digits}\nmodel: {kind: cnn}\n"
DEFICIENCIES = (
    (0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998),
    (0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.011820, 0.042940, 0.968881),
    (1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.303900),
)
TO_XYZ = (0.4124, 0.3576, 0.1805, 0.2126, 0.7152, 0.0722, 0.0193, 0.1192, 0.9505)
WHITE = (0.9505, 1.0, 1.089)


def line(time, kind, step, **values):
    return HistoryLine(time=time, kind=kind, step=step, **values)


KILLED = [
    line(100, "started", 0, world_size=2, device="CPU"),
    line(110, "steps", 10, seconds=8.0, memory_bytes=1),
    line(112, "evaluated", 10, seconds=2.0),
    line(113, "saved", 10, seconds=1.0, stall_seconds=0.5),
    line(120, "steps", 20, seconds=6.0, memory_bytes=1),
    line(150, "started", 10, world_size=1, device="CPU"),
    line(160, "steps", 20, seconds=9.0, memory_bytes=1),
    line(161, "ended", 20, status="finished"),
]


def test_goodput_leaves_out_what_was_lost():
    spent = goodput(starts(KILLED))
    assert (spent.wall, spent.steps, spent.repeated) == (61.0, 17.0, 6.0)
    assert (spent.evaluations, spent.saves, spent.down) == (2.0, 0.5, 30.0)
    assert spent.rest == pytest.approx(61 - 17 - 6 - 2 - 0.5 - 30) and spent.share == pytest.approx(17 / 61)


def test_goodput_counts_from_the_start_of_each_command():
    """A restart by the same command counts from its own start: before it was down."""
    command, other = replace(KILLED[0], seconds=8.0), replace(KILLED[5], seconds=9.0)
    by_two = goodput(starts([command, *KILLED[1:5], other, *KILLED[6:]]))
    assert (by_two.wall, by_two.down) == (69.0, 21.0)
    by_one = goodput(starts([command, *KILLED[1:5], replace(other, seconds=58.0), *KILLED[6:]]))
    assert (by_one.wall, by_one.down) == (69.0, 30.0)


def test_goodput_knows_what_live_recoveries_took():
    lost = line(115, "regrouped", 15, message="after step 15: training goes on", seconds=0.75)
    spent, before = goodput(starts([*KILLED[:4], lost, *KILLED[4:]])), goodput(starts(KILLED))
    assert (spent.recoveries, spent.steps) == (0.75, before.steps)
    assert spent.rest == pytest.approx(before.rest - 0.75)


def test_steps_between_two_logged_ones_count_in_proportion():
    resumed_at_15 = [*KILLED[:5], line(150, "started", 15), line(161, "ended", 15, status="finished")]
    spent = goodput(starts(resumed_at_15))
    assert (spent.steps, spent.repeated) == (8 + 3, 3)


def test_steps_that_are_lost_twice_count_once():
    twice = [*KILLED[:5], line(130, "started", 10), line(140, "steps", 16, seconds=5.0), line(150, "started", 0)]
    spent = goodput(starts(twice))
    assert (spent.steps, spent.repeated) == (0, 8 + 6 + 5)


def test_a_new_run_in_the_same_folder_forgets_the_old_one():
    again = [*KILLED, line(200, "started", 0, world_size=1, device="CPU"), line(201, "steps", 1, seconds=1.0)]
    assert [start.began for start in starts(again)] == [200]


def test_the_timeline_names_kills_and_changes_of_size():
    texts = [each.text for each in timeline(starts(KILLED), is_running=False)]
    assert texts[0] == "started on 2 processes (CPU)"
    assert texts[3] == (
        "ended without a word after step 20: killed, or its machine was lost; steps 11 to 20 were done again"
    )
    assert texts[4] == "resumed at step 10 on 1 process (CPU); before, there were 2" and texts[-1] == "finished"
    assert len(timeline(starts(KILLED[:5]), is_running=True)) + 1 == len(timeline(starts(KILLED[:5]), is_running=False))


def test_long_curves_keep_their_extremes():
    values = [float(number % 7) for number in range(10**6)]
    values[123456], values[654321] = 1000.0, -1000.0
    values[5] = None
    short = shortened(LoggedCurve(steps=list(range(10**6)), values=values), MOST_POINTS)
    assert len(short.steps) <= MOST_POINTS and short.steps == sorted(set(short.steps))
    assert {1000.0, -1000.0} < set(short.values)


def test_a_line_that_a_kill_has_cut_short_is_ended(tmp_path):
    from observed_events import started as run_started

    (tmp_path / "history.jsonl").write_text('{"time": 1, "kind": "sta')
    RunHistory(tmp_path).notice(run_started(tmp_path))
    assert [json.loads(text)["kind"] for text in (tmp_path / "history.jsonl").read_text().splitlines()[1:]] == [
        "started"
    ]


def test_a_run_that_was_killed_and_went_on_with_fewer_processes(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    often = ["checkpoint.every_steps=4", "launch.max_restarts=0"]
    process = started(tmp_path, "train", "c.yaml", "run.name=r", "launch.processes=2", *LONG, *often)
    run = tmp_path / "runs" / "r"
    wait_for_steps(run, 10)
    assert lockstep(tmp_path, "report", "runs/r", "--out", "live.html").returncode == 0
    assert "running, or killed" in (tmp_path / "live.html").read_text()
    for worker in workers(process):
        worker.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    lost = read(run).history[-1].step
    ended = lockstep(tmp_path, "train", str(run / "recipe.yaml"), "train.epochs=null", f"train.steps={lost + 20}",
                     "launch.processes=1", "--allow-drift")  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    history = starts(read(run).history)
    spent = goodput(history)
    parts = (spent.steps, spent.repeated, spent.evaluations, spent.saves, spent.down, spent.rest)
    assert [start.world_size for start in history] == [2, 1] and history[0].status is None
    assert sum(parts) == pytest.approx(spent.wall, rel=0.02) and min(parts) >= 0 and 0 < spent.share < 1
    page = (run / "report.html").read_text()
    assert "ended without a word after step" in page and "on 1 process" in page and "finished" in page
    assert read(run).summary.digest in page


def test_a_folder_that_is_no_run_and_files_that_are_broken(tmp_path):
    ran = lockstep(tmp_path, "report", str(tmp_path))
    assert ran.returncode == 2 and "is no run, no checkpoint and no export: there is no recipe.yaml" in ran.stderr
    (tmp_path / "c.yaml").write_text(CONFIG)
    assert lockstep(tmp_path, "train", "c.yaml", "run.name=r", *SHORT).returncode == 0
    run = tmp_path / "runs" / "r"
    (run / "summary.json").write_text("{")
    (run / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": null, "<b>": 2.0}\n{"ki\n[1]\n')
    (run / "history.jsonl").write_text('{"kind": "steps", "step": 3}\n\x00')
    ran = lockstep(tmp_path, "report", "runs/r", "--out", "page.html")
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "page.html").read_text()
    assert "2 lines of metrics.jsonl left out" in page and "summary.json cannot be read" in page
    assert "<b>" not in page.replace("<b><bdi>", "")
    ran = lockstep(tmp_path, "report", "runs/r", "--out", str(tmp_path / "none" / "page.html"))
    assert ran.returncode == 2 and "name another file with --out" in ran.stderr


def test_a_start_before_all_calendars(tmp_path):
    """A clock that jumped, or somebody else's file."""
    (tmp_path / "recipe.yaml").write_text(CONFIG)
    (tmp_path / "history.jsonl").write_text('{"time": 1, "kind": "started", "step": 0, "seconds": 1e11}\n')
    assert "started on 1 process" in html([read(tmp_path)])


def test_values_of_variables_are_not_shown(tmp_path):
    """A page is given to others; a token may be among the variables, also of Ray."""
    launch = "{kind: ray, environment: {HF_TOKEN: hf_secret}, runtime_env: {env_vars: {KEY: wb_secret}, pip: [peft]}}"
    (tmp_path / "recipe.yaml").write_text(f"{CONFIG}launch: {launch}\n")
    page = html([read(tmp_path)])
    assert "launch.environment.HF_TOKEN" in page and "launch.runtime_env.env_vars.KEY" in page and "peft" in page
    assert "hf_secret" not in page and "wb_secret" not in page


def test_colours_of_curves_differ_for_all_eyes():
    """Also as seen without red, green or blue cones (Machado, Oliveira and Fernandes, 2009), in CIELAB."""
    sights = [np.eye(3), *(np.array(each).reshape(3, 3) for each in DEFICIENCIES)]
    hexes = [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in COLOURS]
    linear = np.where(np.array(hexes) <= 0.04045, np.array(hexes) / 12.92, ((np.array(hexes) + 0.055) / 1.055) ** 2.4)
    for sight in sights:
        x, y, z = np.cbrt(np.clip(linear @ sight.T, 1e-4, 1) @ np.array(TO_XYZ).reshape(3, 3).T / WHITE).T
        lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], axis=1)
        apart = [np.linalg.norm(lab[i] - lab[j]) for i in range(len(lab)) for j in range(i)]
        assert min(apart) > 15 and apart[0] > 60
