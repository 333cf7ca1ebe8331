"""Proofs of recipes, in this process."""

import sys

import torch.distributed as dist
from training_runs import config_in

from lockstep.base import trust
from lockstep.base.errors import LockstepError
from lockstep.base.world import World
from lockstep.core.host.signals import SignalWatch
from lockstep.recipe import recipe_trust
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import prepare_splits
from lockstep.run.tasks.prove import ProofTask
from lockstep.tools.prove.proof_runs import ProofRun, ProofRuns
from lockstep.tools.prove.proving import Proof


def run_of_proof(asked, recipe):
    """A proof's run on this rank -> exit code and message. A user's globals are new in each run."""
    for name in [name for name in sys.modules if name.startswith("lockstep_user_")]:
        del sys.modules[name]
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    job = ProofTask(recipe, world, SignalWatch(), request=asked)
    try:
        job.run("auto", allow_drift=False)
    except LockstepError as error:
        return error.exit_code, str(error)
    finally:
        job.close()
    return 0, ""


class WarmRuns(ProofRuns):
    """Runs in the processes of the fixture `ranks`."""

    ranks = None

    def ended(self, variant, poll=None):
        folder = self.folder / variant.name
        folder.mkdir(parents=True, exist_ok=True)
        self.report(f"{variant} ...")
        recipe = variant.recipe(self.recipe, folder, steps=self.steps)
        asked = folder / "request.json"
        asked.write_text(variant.request.model_dump_json())
        ended = self.ranks(variant.processes, run_of_proof, asked, recipe)
        return ended[0][0], ProofRun(folder=folder, output=ended[0][1], peak_bytes=0)


def proof_of(ranks, folder, steps=4, **sections):
    recipe = Recipe.model_validate(config_in(folder, "a", **sections))
    said = []
    trust.own(recipe_trust.code_of_files(recipe))
    data = prepare_splits(recipe, lambda _: None)
    proof = Proof(recipe=recipe, folder=folder / "proof", steps=steps, data=data, report=said.append)
    proof.runs = WarmRuns(**vars(proof.runs))
    proof.runs.ranks, proof.said = ranks, said
    return proof
