"""What the user should know before training starts."""

from lockstep.base.world import World
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.launch.elastic import live_notes
from lockstep.launch.launch_config import LiveLaunchSection
from lockstep.run.components import Components
from lockstep.training.findings import LOSS_IS


def start_notes(parts: Components, world: World) -> list[str]:
    """Sentences, the same on every rank. Collective."""
    notes = list[str]()
    idle = all_gather_object(not parts.owned(0)[0]).count(True)
    if idle:
        notes.append(
            f"a step has {parts.order.shards_per_step} micro-batches, too few for {world.size} processes: "
            f"{idle} of them idle; launch.processes={world.size - idle} is as fast"
        )
    if parts.state.step > parts.total_steps:
        what = f"the checkpoint is one of step {parts.state.step:,}, but the run has {parts.total_steps:,} steps"
        notes.append(f"{what}: there is nothing left to train")
    notes += parts.model._lockstep_notes + (parts.warm_start.notes if parts.warm_start else ())
    kind, launch = parts.recipe.parallel.kind, parts.recipe.launch
    is_open = isinstance(launch, LiveLaunchSection) and launch.recovery == "auto" and launch.max_restarts > 0
    if world.has_agent and world.size > 1 and is_open and parts.recipe.parallel.state_copies == 1:
        notes.append(
            f"if a process is lost, all start again from the newest checkpoint: with parallel.kind={kind} they hold "
            "one copy of the training state together"
        )
    if live_notes.is_live_worker() and parts.recipe.observe.file is not None:
        notes.append(
            "if rank 0 is lost, the observers of observe.file begin anew on another process: one that steers by what "
            "it remembers may then ask for something else; launch.recovery=restart keeps that"
        )
    if parts.world_size_dependence:
        notes.append(parts.world_size_dependence)
    if parts.recipe.train.loss_is == "batch_wise":
        notes.append(LOSS_IS)
    return notes
