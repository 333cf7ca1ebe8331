"""train.compile; that its bits are those of any number of processes is in test_strategies.py (make test-matrix)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from training_runs import config_in

from lockstep.base.errors import ConfigError
from lockstep.base.model_contracts import MicroBatch
from lockstep.base.world import World
from lockstep.core.numerics import precision
from lockstep.recipe import build
from lockstep.recipe.recipe import Recipe


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "train.compile: on a CPU torch.compile needs a C++ compiler; install g++"),
        (["parallel.kind=pipeline"], "train.compile: blocks are not compiled where processes share a model"),
        (["parallel.kind=tensor"], "train.compile: blocks are not compiled where processes share a model"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(tmp_path, settings, message):
    """Without any compiler on the path."""
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\ntrain: {compile: true, steps: 2}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml", "launch.processes=2", *settings]
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count(message) == 1


def test_code_that_somebody_else_may_have_put_there_is_not_executed(tmp_path, monkeypatch):
    """In the folder of compiled code: its name, in the shared folder for temporary files, can be guessed."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv(precision.COMPILED, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    assert folder.parent == tmp_path
    precision._claim_cache()
    folder.chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"others could write to .*, whose code torch.compile would execute: remove it"
    ):
        precision._claim_cache()
    folder.rename(tmp_path / "planted")
    folder.symlink_to(tmp_path / "planted")
    with pytest.raises(ConfigError, match="others could write to"):
        precision._claim_cache()
    if os.getuid() == 0:
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        with pytest.raises(ConfigError, match="or name another folder with TORCH"):
            precision._claim_cache()


def test_the_check_of_the_users_code_compiles_nothing(ranks, tmp_path):
    """It looks into each module, in which a step does not: all of it would be compiled a second time."""
    config = config_in(tmp_path, "a", model={"kind": "cnn"}, train={"steps": 2, "compile": True})
    assert ranks(1, compiled_by_check, config) == [([], 0)]


def compiled_by_check(config):
    """What the check finds, and how much of the model is compiled for it."""
    from torch._dynamo.utils import counters

    parts = build.assemble(Recipe.model_validate(config), World(rank=0, size=1), torch.device("cpu"))
    batch = parts.data.first_training_batch(parts.order, parts.device, step=0, workers=0)
    micro_batch = MicroBatch(step=0, shard=0, indices=(), present=(0,), batch=batch)
    counters.clear()
    return parts.check_user_code(micro_batch), counters["frames"]["total"]
