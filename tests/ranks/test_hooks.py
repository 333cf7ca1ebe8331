"""Hooks for gradients of the user's: they act on any number of processes, or are refused by name."""

import pathlib

import pytest
import torch
from places import OWN
from training_runs import config_in, run_on_rank

from lockstep.checkpoint import layout, reader

FILE = str(OWN / "hooked.py")


def run(ranks, tmp_path, kind, world, **sections):
    name = f"{kind}-{world}-{len(list(tmp_path.iterdir()))}"
    model = {"kind": "user", "file": FILE, "options": {"kind": kind}}
    config = config_in(tmp_path, name, run={"dir": str(tmp_path), "name": name}, model=model, **sections)
    return ranks(world, run_on_rank, config)[0]


def weight(checkpoint):
    name = next(name for name in reader.contents(checkpoint) if name.endswith("first.weight"))
    reader.load(checkpoint, read := {name: torch.empty(16, 64)})
    return read[name]


@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_a_parameters_hook_acts_on_any_number_of_processes_and_is_refused_where_it_would_be_lost(ranks, tmp_path, kind):
    found = [run(ranks, tmp_path, kind, world, optim={"weight_decay": 0.0}) for world in (1, 2, 3)]
    assert len({each["digest"] for each in found}) == 1
    newest, *_, oldest = layout.listed(pathlib.Path(found[0]["folder"]) / "checkpoints")
    moved = (weight(newest) - weight(oldest)).abs().sum(1)
    assert (moved[0::2] == 0).all()
    assert (moved[1::2] > 0).all()
    for strategy in ({"kind": "fsdp"}, {"kind": "pipeline", "stages": 2}):
        refused = run(ranks, tmp_path, kind, 2, parallel=strategy)
        assert "the parameter network.first.weight has a hook for its gradient" in refused
        assert "use parallel.kind=ddp" in refused


def test_a_modules_hook_acts_under_fsdp_and_is_refused_by_a_pipeline(ranks, tmp_path):
    found = [run(ranks, tmp_path, "module", 1)]
    found += [run(ranks, tmp_path, "module", 2, parallel={"kind": kind}) for kind in ("ddp", "fsdp")]
    assert [each for each in found if isinstance(each, str)] == []
    assert len({each["digest"] for each in found}) == 1
    refused = run(ranks, tmp_path, "module", 2, parallel={"kind": "pipeline", "stages": 2})
    assert "a pipeline may cut behind network.head, whose hook for backward passes" in refused
