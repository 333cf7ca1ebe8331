"""Runs of each objective."""

import time

from training_runs import trained

SETTINGS = ["train.epochs=6", "train.global_batch=32", "train.micro_batch=8", "optim.lr=0.003"]
SETTINGS += ["checkpoint.every_steps=10", "observe.log_every=1", "evaluate.every_epochs=3"]
BRIEF = ["train.epochs=2", "evaluate.every_epochs=1", "data.limit=100"]
"""For runs of which only the bits are compared: eight steps, each fourth of four samples."""
VARIANTS = {
    "one": ["launch.processes=1"],
    "two": ["launch.processes=2"],
    "three": ["launch.processes=3"],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
}


def brief_runs(ranks, config, settings=SETTINGS):
    """Brief runs of a config file -> variant -> summary; two processes are among those that hold parts of a model."""
    name, kept = config.stem, {each: own for each, own in VARIANTS.items() if each != "two"}
    return {each: trained(ranks, config, f"{name}-{each}-brief", *settings, *own, *BRIEF) for each, own in kept.items()}


def wait_for_checkpoint(checkpoint, seconds=60):
    end = time.monotonic() + seconds
    while not (checkpoint / "manifest.json").exists():
        assert time.monotonic() < end, f"{checkpoint} was never written"
        time.sleep(0.02)
