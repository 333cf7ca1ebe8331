"""Kill -9 at random steps, resumed on another number of processes each time: the weights of the run left alone."""

import json
import random
import time

import psutil
import pytest
from places import DATA
from running import lockstep, started, summary, workers

LIMIT, GLOBAL_BATCH = 950, 16
STEPS = 2 * 60
"""Two epochs; the last step of each holds 6 samples: two of the four shards, one of them short."""
SETTINGS = ["train.epochs=2", f"data.limit={LIMIT}", f"train.global_batch={GLOBAL_BATCH}", "train.micro_batch=4"]
SETTINGS += [
    "launch.max_restarts=0",
    "observe.log_every=1",
    "checkpoint.every_steps=4",
    "evaluate.every_epochs=null",
    "evaluate.micro_batch=500",
]
WORLDS = (1, 2, 3, 4)
DIGITS = "data: {kind: digits}\n"


def mnist():
    """Real MNIST where it is at hand, else the digits, which always are."""
    return f"data: {{kind: mnist, root: {DATA}}}\n" if (DATA / "mnist").is_dir() else DIGITS


def draw(seed, kills):
    """Where to kill and on how many processes to go on: (step, world) of each kill, and the last world.

    The last third is spared: a run goes on for some steps between the look at its log and the kill.
    """
    chance = random.Random(seed)
    places = sorted(chance.sample(range(1, STEPS * 2 // 3), kills))
    worlds = [chance.choice(WORLDS)]
    while len(worlds) <= kills:
        worlds.append(chance.choice([world for world in WORLDS if world != worlds[-1]]))
    return list(zip(places, worlds, strict=False)), worlds[-1]


def wait_for_step(log, step, before):
    """Wait until this start of the run, which writes its log anew, has logged a step."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if log.exists() and log.stat().st_ino != before:
            complete = log.read_text().rpartition("\n")[0].splitlines()
            if complete and json.loads(complete[-1])["step"] >= step:
                return
        time.sleep(0.01)
    pytest.fail(f"{log} did not come to step {step}")


def kill_one(folder, arguments, step, chance):
    """Start a run, or go on with it, and kill one of its processes once a step is logged."""
    log = folder / "runs" / "killed" / "metrics.jsonl"
    before = log.stat().st_ino if log.exists() else None
    process = started(folder, *arguments)
    wait_for_step(log, step, before)
    victim = chance.choice(workers(process))
    victim.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    assert f"process {victim.pid}) was killed (SIGKILL" in output, output
    assert not psutil.pid_exists(victim.pid)


def survives(folder, kills, data):
    """The digest after so many kills is the digest of one process that nobody disturbed."""
    seed = random.SystemRandom().randrange(10**6)
    chance, (drawn, last) = random.Random(seed), draw(seed, kills)
    print(f"seed {seed}: killed at (step, processes) {drawn}, ended on {last}")  # noqa: T201
    (folder / "c.yaml").write_text(data)
    whole = lockstep(folder, "train", "c.yaml", *SETTINGS, "run.name=whole", "launch.processes=1")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    command = ["train", "c.yaml", *SETTINGS, "run.name=killed"]
    for step, world in drawn:
        kill_one(folder, [*command, f"launch.processes={world}"], step, chance)
    again = lockstep(folder, *command, f"launch.processes={last}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed after step" in again.stdout
    expected, found = summary(folder, "whole"), summary(folder, "killed")
    assert found["steps"] == expected["steps"] == STEPS
    assert (found["world_size"], expected["world_size"]) == (last, 1)
    for name in ("digest", "evaluation", "samples_seen"):
        assert found[name] == expected[name], name


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_two_kills(tmp_path):
    survives(tmp_path, 2, DIGITS)


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_eight_kills(tmp_path):
    survives(tmp_path, 8, mnist())
