"""What a person sees of a run: lines, the log file, and the bar on a terminal."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from observed_events import ended, evaluated, run, started, step
from rich.console import Console

from lockstep.base.events import CheckpointSaved, EpochDone, Evaluating, Preparing, Warned
from lockstep.observe import progress_bar
from lockstep.observe.sinks import progress


def shown(*events, quiet_seconds=0.0):
    text = io.StringIO()
    lines = progress.ProgressLines(Console(file=text, width=60), quiet_seconds)
    for event in events:
        lines.notice(event)
    lines.close()
    return text.getvalue().splitlines()


def test_plain_lines(tmp_path):
    """Long lines are not wrapped and brackets are no markup: a log can be searched."""
    lines = shown(
        Preparing(what="tokenising texts", done=10, total=20),
        Preparing(what="tokenising texts", done=12000, total=12000),
        started(
            tmp_path, resumed_step=5, notes=("reproducibility is fast [/bold] and this is a long sentence about it",)
        ),
        step(6),
        step(20, loss=0.03125, accuracy=0.99, learning_rate=0.00012, gradient_norm=1.5, samples_per_second=5312.4),
        evaluated(20),
        CheckpointSaved(step=20, folder=Path("x/step-000000020"), seconds=0.256, stall_seconds=0.0034),
        Warned(message="passed over step-000000010: [red]cannot be read"),
        EpochDone(epoch=4, step=20),
        ended(tmp_path),
    )
    assert lines == [
        "tokenising texts: 12,000 done",
        "run trial: 12,345 parameters, 1,000 training samples, 20 steps (5 per epoch) on 2 processes, CPU",
        "resumed after step 5",
        "note: reproducibility is fast [/bold] and this is a long sentence about it",
        "step 20/20 · epoch 4 · loss 0.0312 · accuracy 0.9900 · lr 0.00012 · grad norm 1.5000 · 5,312 samples/s",
        "test after step 20 (200 samples): accuracy 0.2000 · loss 0.5000",
        "checkpoint step-000000020 saved in 0.26 s, training stood still for 3 ms",
        "warning: passed over step-000000010: [red]cannot be read",
        "finished after 20 steps · digest 0123456789abcdef",
        "test: accuracy 0.9800",
        f"everything is in {tmp_path}",
    ]


def test_lines_for_steps_are_rare_but_the_last_always_comes(tmp_path):
    lines = shown(started(tmp_path), *(step(number, loss=1.0) for number in range(1, 21)), quiet_seconds=60)
    assert [line.split(" ·")[0] for line in lines[1:]] == ["step 1/20", "step 20/20"]


def test_time_left_counts_from_the_resumed_step(tmp_path, monkeypatch):
    clock = iter([100.0, 104.0, 104.0])
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    lines = shown(started(tmp_path, resumed_step=10, total_steps=20), step(12, loss=1.0))
    assert lines[-1].endswith("· 0:00:16 left")


def test_a_preparation_that_takes_long_shows_how_far_it_is(monkeypatch):
    """Where there is no terminal: every five seconds, besides the end; a second one begins anew."""
    now, text = 0.0, io.StringIO()
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: now))
    lines = progress.ProgressLines(Console(file=text, width=100))
    for what in ("measuring samples", "tokenising texts"):
        for done in range(2, 15, 2):
            now += 2
            lines.notice(Preparing(what=what, done=done, total=14))
    assert text.getvalue().splitlines() == [
        *("measuring samples: 8 of 14", "measuring samples: 14 done"),
        *("tokenising texts: 8 of 14", "tokenising texts: 14 done"),
    ]


def test_an_evaluation_that_takes_long_shows_how_far_it_is(monkeypatch):
    """A line every five seconds; none for one that takes less, or at its end."""
    now = 100.0
    monkeypatch.setattr(progress_bar, "time", SimpleNamespace(monotonic=lambda: now))
    text = io.StringIO()
    lines = progress.ProgressLines(Console(file=text, width=200))
    for after, total, seconds in ((10, 5, 0.9), (20, 8, 2.0), (30, 3000, 0.003)):
        for done in range(1, total + 1):
            now += seconds
            lines.notice(Evaluating(step=after, done=done, total=total))
    assert text.getvalue().splitlines() == [
        "evaluating after step 20: 4 of 8 micro-batches",
        "evaluating after step 20: 7 of 8 micro-batches",
        "evaluating after step 30: 1,668 of 3,000 micro-batches",
    ]


def test_the_log_file_has_every_logged_step_and_grows_over_resumes(tmp_path, capsys):
    for resumed_step in (0, 10):
        sink = progress.build(tmp_path)
        run(sink, tmp_path, range(resumed_step + 1, resumed_step + 11), resumed_step)
        sink.close()
    lines = (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8").splitlines()
    steps = [line.split("/")[0] for line in lines if line.startswith("step")]
    assert steps == [f"step {number}" for number in range(1, 21)]
    assert "resumed after step 10" in lines
    assert not any("\x1b" in line for line in lines)
    assert "run trial: 12,345 parameters" in capsys.readouterr().out


def test_the_log_can_be_read_while_it_is_written(tmp_path, capsys):
    sink = progress.build(tmp_path)
    sink.notice(Warned(message="now"))
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "warning: now\n"
    sink.close()


def test_bar_on_a_terminal(tmp_path):
    text = io.StringIO()
    bar = progress.ProgressBar(Console(force_terminal=True, file=text, width=160))
    bar.notice(Preparing(what="tokenising texts", done=3, total=9))
    bar.notice(started(tmp_path, resumed_step=5))
    for number in range(6, 18):
        bar.notice(step(number, loss=1 / number) if number % 2 else step(number))
    bar.progress.refresh()
    frame = text.getvalue().rsplit("\x1b[2K", 2)[-1]
    assert "epoch 4" in frame
    assert "17/20" in frame
    assert "loss 0.0588" in frame
    bar.notice(evaluated(17))
    bar.notice(ended(tmp_path))
    bar.close()
    whole = text.getvalue()
    assert "tokenising texts" in whole and "3/9" in whole
    assert "test after step 17 (200 samples): accuracy 0.1700" in whole
    assert whole.rstrip().endswith(f"everything is in {tmp_path}")
    assert whole.count("\x1b[?25l") == whole.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back


@pytest.mark.parametrize("width", [60, 80, 120])
def test_bars_fit_any_terminal(tmp_path, width):
    """The count and the remaining time stay whole; figures go below the bars where there is no room beside them."""
    text = io.StringIO()
    bar = progress.ProgressBar(Console(force_terminal=True, file=text, width=width, color_system=None))
    bar.notice(Preparing(what="tokenising texts", done=30_000, total=120_000))
    bar.notice(started(tmp_path, total_steps=24_000))
    bar.notice(step(10_000, loss=0.3, accuracy=0.5, samples_per_second=5200.0))
    bar.notice(Evaluating(step=10_000, done=30, total=7600))
    bar.progress.refresh()
    bar.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in text.getvalue().splitlines()[-4:]]
    assert max(map(len, lines)) <= width
    training = next(line for line in lines if line.startswith("epoch"))
    assert "10,000/24,000" in training and training.endswith("left")
    assert any("30/7,600" in line for line in lines)
    assert ("5,200 samples/s" in training) == (width == 120)
    assert width == 120 or "loss 0.3000 · accuracy 0.5000 · 5,200 samples/s" in lines


def test_bar_gives_the_terminal_back_after_an_error(tmp_path):
    text = io.StringIO()
    bar = progress.ProgressBar(Console(force_terminal=True, file=text, width=100))
    bar.notice(started(tmp_path))
    bar.close()
    assert text.getvalue().count("\x1b[?25h") == 1


def test_a_count_is_a_bar_on_a_terminal_and_lines_elsewhere():
    text = io.StringIO()
    with progress_bar.counting(Console(file=text, width=80), "predicting", "rows", total=10, done=2) as counter:
        counter.add(1)
        assert text.getvalue() == ""  # lines are rare
        counter.pace.quiet_seconds = 0.0
        counter.add(2)
    assert text.getvalue().startswith("5 of 10 rows · ") and text.getvalue().endswith(" left\n")
    text = io.StringIO()
    terminal = Console(file=text, width=120, force_terminal=True)
    with progress_bar.counting(terminal, "predicting", "rows", total=10_000, done=2) as counter:
        counter.add(4_998)
    assert "predicting" in text.getvalue() and "5,000/10,000" in text.getvalue() and "rows/s" in text.getvalue()
