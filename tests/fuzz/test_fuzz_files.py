"""Checkpoints, exports, run folders and job files that were damaged or edited at random: a message or a result, always."""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from crafting import archived, pickled, sealed
from exporting import image_case
from fuzzing import table

from lockstep.base.errors import UserError
from lockstep.inference import trained_model

SEED = 20261
INPUTS = {"checkpoint": 40, "run folder": 30, "job file": 20, "export": 50}
QUICK = 5
"""Of so many damages, one is tried in the quick tests, all in the matrix."""
EXPORTS = ("safetensors", "state_dict", "torch_export")
CONFIG = """
run: {dir: runs, name: one}
data: {kind: digits, limit: 32}
train: {steps: 2, global_batch: 16, micro_batch: 8}
checkpoint: {every_steps: 1}
evaluate: {micro_batch: 512}
observe: {sinks: [jsonl]}
launch: {processes: 1}
"""
ODD = [None, True, -5, 10**9, 10**30, 1.5, float("nan"), "", "../x", "\x1b[2J", [], {}, [[]], {"a": {}}, "9" * 5000]
COMMANDS = {
    "checkpoint": [["checkpoints", "runs/one", "--verify"], ["worker", "runs/one/recipe.yaml"]],
    "run folder": [
        ["checkpoints", "runs/one"],
        ["compare", "runs/one", "runs/one"],
        ["worker", "runs/one/recipe.yaml"],
        ["logs", "runs/one"],
    ],
    "job file": [["status", "runs/one"], ["cancel", "runs/one"], ["logs", "runs/one", "--rank", "0"]],
}


@pytest.fixture(scope="module")
def valid(commands, tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid")
    (folder / "c.yaml").write_text(CONFIG)
    answer = commands.answer(["worker", "c.yaml"], folder=folder, seconds=60)
    assert answer.kind == "done", answer
    run = folder / "runs/one"
    shutil.copy(run / "recipe.yaml", run / "launch.yaml")
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs/rank-0.log").write_text("step 1/2 loss 1\n")
    (run / "job.json").write_text(
        json.dumps({"kind": "local", "host": os.uname().nodename, "process": 2**22, "began": 1.5})
    )
    for kind in EXPORTS:
        image_case().export(folder / "exports" / kind, kind)
    return folder


def edited(random, file):
    """Another type or a huge number somewhere in a JSON file, or nesting without end."""
    if random.random() < 0.15:
        file.write_text("[" * 100000)
        return
    body = json.loads(file.read_bytes())
    place = body
    while isinstance(place, dict) and place:
        key = random.choice(sorted(place))
        if random.random() < 0.5 or not isinstance(place[key], dict) or not place[key]:
            place[key] = random.choice(ODD)
            break
        place = place[key]
    file.write_text(json.dumps(body))


def damaged(random, file, folder):
    """One change to a file -> what kind."""
    changes = {
        "gone": file.unlink,
        "cut": lambda: os.truncate(file, random.randrange(file.stat().st_size + 1)),
        "bytes": lambda: file.write_bytes(random.randbytes(random.randrange(200))),
        "flipped": lambda: flipped(random, file),
        "pickle": lambda: file.write_bytes(pickled()),
        "archive": lambda: archived(file),
        "fifo": lambda: (file.unlink(), os.mkfifo(file)),
        "folder": lambda: (file.unlink(), file.mkdir()),
        "link out": lambda: (file.unlink(), file.symlink_to(folder / "c.yaml")),
        "endless": lambda: (file.unlink(), file.symlink_to("/dev/zero")),
        "huge": lambda: os.truncate(file, 1 << 42),
    }
    if file.suffix == ".json":
        changes |= {f"edited {number}": lambda: edited(random, file) for number in range(6)}
    name = random.choice(sorted(changes))
    changes[name]()
    return name.split(" ")[0]


def flipped(random, file):
    content = bytearray(file.read_bytes() or b"\0")
    for _ in range(8):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def manifest(random, checkpoint):
    """A manifest that is sealed as its writer would, with something else in it."""
    key = random.choice(["step", "epoch", "world_size", "saved_at", "numeric", "progress", "metrics", "digest"])
    value = random.choice(ODD)
    if key == "progress" and random.random() < 0.7:
        body = json.loads((checkpoint / "manifest.json").read_bytes())["progress"]
        value = body | {random.choice(sorted(body)): value}
    sealed(checkpoint, **{key: value})


def target(random, what, folder):
    """A file to be damaged."""
    run = folder / "runs/one"
    if what == "export":
        place = folder / "export"
    elif what == "checkpoint":
        place = run / "checkpoints/step-000000002"
    elif what == "job file":
        return random.choice([run / "job.json", run / "summary.json", run / "logs/rank-0.log", run / "launch.yaml"])
    else:
        return random.choice([run / name for name in ("recipe.yaml", "summary.json", "metrics.jsonl")])
    return random.choice(sorted(file for file in place.iterdir() if file.is_file()))


@pytest.fixture(scope="module")
def answers():
    """(what, answer) of all, shown at the end."""
    found = []
    yield found
    sys.stdout.write(f"\n{table(found)}\n")


def opened(path):
    """What serving and predicting do, to the end of opening, and one prediction."""
    try:
        predictor = trained_model.open_predictor(Path(path))
    except UserError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    assert predictor.scores([np.zeros((1, 8, 8), np.uint8)]).shape == (1, 3)
    return 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("what", "count"),
    [
        *((what, count // QUICK) for what, count in INPUTS.items()),
        *(pytest.param(what, count, marks=pytest.mark.matrix) for what, count in INPUTS.items()),
    ],
)
def test_every_damage_is_answered(commands, valid, answers, tmp_path, what, count):
    chance, bad = random.Random(f"{SEED} {what}"), []
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(valid / "runs", folder / "runs")
        shutil.copy(valid / "c.yaml", folder)
        shutil.copytree(valid / "exports" / chance.choice(EXPORTS), folder / "export")
        recipe = folder / "runs/one/recipe.yaml"
        recipe.write_text(recipe.read_text().replace(str(valid), str(folder)))
        if what == "checkpoint" and chance.random() < 0.5:
            manifest(chance, folder / "runs/one/checkpoints/step-000000002")
            kind = "sealed"
        else:
            kind = damaged(chance, target(chance, what, folder), folder)
        call = (opened, "export") if what == "export" else (chance.choice(COMMANDS[what]),)
        answer = commands.answer(*call, folder=folder)
        answers.append((what, answer))
        is_resumed = what != "checkpoint" or call[0][0] != "worker" or answer.kind == "done"  # from an older one
        if not (answer.is_good and is_resumed):
            bad.append(f"{number}: {kind}, {call}: {answer.kind} ({answer.code})\n{answer.output[-800:]}")
        shutil.rmtree(folder)
    assert not bad, "\n".join(bad)
