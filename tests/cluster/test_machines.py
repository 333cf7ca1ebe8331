"""Two machines, as network namespaces joined by a bridge: the same bits as on one process of one machine."""

import json
import os
import subprocess
import sys

import pytest
from networks import can_make_namespaces, loopback, namespaces

SETTINGS = [
    "train.epochs=1",
    "data.limit=170",
    "train.global_batch=32",
    "train.micro_batch=4",
    "evaluate.micro_batch=64",
]
"""Five whole steps of eight shards, and a ragged one."""


def run(folder, places, name):
    """A worker at each place, to its end -> the run's summary, and what rank 0 said."""
    arguments = ["-m", "lockstep.run.worker", "c.yaml", *SETTINGS, f"run.name={name}"]
    started = [
        subprocess.Popen(
            [*place.prefix, sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, **place.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return json.loads((folder / "runs" / name / "summary.json").read_text()), outputs[0]


@pytest.mark.matrix
@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")
def test_two_machines_give_the_bits_of_one_process(tmp_path):
    """The two ranks of a machine share memory, and the machines exchange what that comes to."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    lone = run(tmp_path, loopback(1), "lone")[0]
    with namespaces(machines=2, ranks_each=2) as places:
        spread, output = run(tmp_path, places, "spread")
    assert (lone["world_size"], spread["world_size"]) == (1, 4), output
    for name in ("digest", "chain", "steps", "evaluation"):
        assert spread[name] == lone[name], name
