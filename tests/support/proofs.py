"""Proofs of recipes, in this process."""

import sys
from unittest.mock import patch

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
from lockstep.tools import trials
from lockstep.tools.prove.proof_runs import ProofRuns, request_for
from lockstep.tools.prove.proving import Proof
from lockstep.tools.trials import TrialEnd


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

    def ended(self, *args, **options):
        with patch.object(trials, "run", self.warm_run):
            return super().ended(*args, **options)

    def warm_run(self, recipe, folder, *, request, processes, **_):
        file = folder / "request.json"
        file.write_text(request.model_dump_json())
        code, output = self.ranks(processes, run_of_proof, file, recipe)[0]
        return TrialEnd(code=code, output=output, peak_bytes=0)


def proof_of(ranks, folder, steps=4, **sections):
    recipe = Recipe.model_validate(config_in(folder, "a", **sections))
    said = []
    trust.own(recipe_trust.code_of_files(recipe))
    data = prepare_splits(recipe, lambda _: None)
    request, place = request_for(recipe, data), folder / "proof"
    runs = WarmRuns(recipe=recipe, folder=place, steps=steps, request=request, report=said.append)
    proof = Proof(runs=runs, data=data)
    runs.ranks, proof.said = ranks, said
    return proof
