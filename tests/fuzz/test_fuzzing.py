"""The harness of the fuzzers: every way in which an input can be answered is told from the others."""

import os
import sys
import time
from pathlib import Path

import fuzzing
import pytest


def _loop():
    while True:
        time.sleep(1)


def _leave_child():
    if os.fork() == 0:
        _loop()
    sys.stdout.write("left\n")


def _raise():
    raise KeyError("bug")


def _quote():
    sys.stderr.write('failed:\n  | Traceback (most recent call last):\n  |   File "mine.py"\n')
    return 1


WAYS = {
    "done": (_leave_child,),
    "message": (_quote,),
    "traceback": (_raise,),
    "silent": (os._exit, 3),
    "executed": (os.mkdir, fuzzing.CANARY),
    "hang": (_loop,),
}


@pytest.mark.parametrize("kind", WAYS)
def test_every_kind_of_answer_is_told_from_the_others(commands, tmp_path, kind):
    found = commands.answer(*WAYS[kind], folder=tmp_path, seconds=1 if kind == "hang" else 20)
    assert found.kind == kind, found
    assert found.is_good == (kind in ("done", "message"))


def test_a_command_that_eats_memory_is_stopped(commands, tmp_path):
    assert commands.answer(bytearray, 1 << 50, folder=tmp_path).kind == "traceback"


def test_real_commands_in_a_warm_process(commands, tmp_path):
    (tmp_path / "c.yaml").write_text("train:\n  epoch: 3\n")
    wrong = commands.answer(["train", "c.yaml", "--dry-run"], folder=tmp_path)
    assert (wrong.kind, wrong.code) == ("message", 2)
    assert wrong.output.startswith("c.yaml:2: train.epoch: unknown key")
    settings = ["data.limit=40", "train.epochs=null", "train.steps=1", "run.name=a"]
    trained = commands.answer(["worker", "c.yaml", "train={}", *settings], folder=tmp_path)
    assert trained.kind == "done", trained.output
    assert Path(tmp_path, "runs/a/summary.json").exists()


def test_the_table_counts_by_kind_of_input():
    answers = [("config", fuzzing.Answer("done", 0, "", 0.1)), ("config", fuzzing.Answer("hang", 0, "", 0.1))]
    lines = fuzzing.table(answers).splitlines()
    assert lines[0].split() == ["input", "tried", *fuzzing.KINDS]
    assert lines[1].split() == ["config", "2", "0", "1", "0", "0", "1", "0"]
    assert lines[2].split()[:2] == ["all", "2"]
