"""`lockstep fork`: a new run from a checkpoint of another, and what it tells."""

import json
import shutil

import pytest
from running import lockstep, summary

from lockstep.data.order import Order
from lockstep.tools import fork

SHORT = ["data.limit=200", "train.epochs=2", "train.global_batch=32", "train.micro_batch=8", "observe.log_every=1"]
KEPT = ["checkpoint.every_steps=1", "checkpoint.keep=50", "evaluate.every_epochs=null"]


@pytest.mark.core
def test_a_run_is_forked_and_forgets(tmp_path):
    """Two processes fork what one has trained; a third run forgets a sample, as if it had never been there."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    trained = lockstep(tmp_path, "train", "c.yaml", "run.name=a", "launch.processes=1", *SHORT, *KEPT)
    assert trained.returncode == 0, trained.stderr
    forked = lockstep(tmp_path, "fork", "runs/a", "--at", "6", "--name", "b", "launch.processes=2", "optim.lr=0.01")
    assert forked.returncode == 0, forked.stderr
    assert f"{tmp_path}/runs/b trains on after step 6 of {tmp_path}/runs/a" in forked.stdout
    assert summary(tmp_path, "b")["parent"]["step"] == 6
    assert [each["field"] for each in summary(tmp_path, "b")["drift"]] == ["optim.lr"]
    order = Order(seed=0, samples=200, global_batch=32, micro_batch=8)
    (tmp_path / "gone.txt").write_text(f"{order.shards(4)[2][1]}\n")
    without = lockstep(tmp_path, "fork", "runs/a", "--without", "gone.txt", "--name", "c")
    assert without.returncode == 0, without.stderr
    assert "data.exclude leaves 1 of 200 training samples out" in without.stdout + without.stderr
    fresh = lockstep(tmp_path, "train", "c.yaml", "run.name=d", "data.exclude=gone.txt", *SHORT, *KEPT)
    assert fresh.returncode == 0, fresh.stderr
    assert summary(tmp_path, "c")["digest"] == summary(tmp_path, "d")["digest"] != summary(tmp_path, "a")["digest"]
    written = json.loads((tmp_path / "runs/c/certificate.json").read_text())
    assert written["digest"] == summary(tmp_path, "c")["digest"] and written["from"]["run"] == f"{tmp_path}/runs/a"
    again = lockstep(tmp_path, "fork", "runs/a", "--name", "b")
    assert again.returncode == 2 and "runs/b is a run already" in again.stderr and "Traceback" not in again.stderr
    for kept in (tmp_path / "runs/b/checkpoints").glob("step-*[!4]"):
        shutil.rmtree(kept)  # all but the last
    replayed = lockstep(tmp_path, "replay", "runs/b", "--step", "9")
    assert replayed.returncode == 0, replayed.stderr
    assert "from the checkpoint of step 6 on" in replayed.stdout
    assert "the chain is that of the log at each step that was logged, up to step 9" in replayed.stdout
    verified = lockstep(tmp_path, "verify", "runs/b")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "8 of 14 steps are run again" in verified.stdout and "steps 7 to 14: the same weights" in verified.stdout
    earlier = lockstep(tmp_path, "replay", "runs/b", "--step", "3")
    assert earlier.returncode == 2 and "was forked at" in earlier.stderr and "replay it there" in earlier.stderr


@pytest.mark.parametrize(
    "run, file, name", [("a", "bad rows (1).txt", "a-without-bad-rows-1"), ("b" * 198, "x", "b" * 198)]
)
def test_any_file_names_a_fork(tmp_path, run, file, name):
    """What no run may be called is not taken from the file's name, nor more than fits."""
    (tmp_path / run).mkdir()
    (tmp_path / run / "recipe.yaml").write_text("data: {kind: digits}\n")
    (tmp_path / file).write_text("3\n")
    planned = {"at": None, "without": tmp_path / file, "from_start": True, "trusts": False}
    assert fork.planned(tmp_path / run, [], **planned)[0].run.name.startswith(name)
