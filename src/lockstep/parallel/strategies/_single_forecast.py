"""One process: everything, and no communication."""

from lockstep.base.errors import LaunchError
from lockstep.core.reduction.tree import root
from lockstep.parallel.forecast import Forecast, Setting, Times
from lockstep.parallel.memory_forecast import HeldMemory, Memory, held, passes


def forecast(setting: Setting) -> Forecast:
    """The whole model, every shard. Raises LaunchError for more than one process."""
    if setting.cluster.world > 1:
        raise LaunchError("it runs one process")
    facts, seconds, shards = setting.facts, setting.seconds, setting.shards
    sums = HeldMemory(before=(0, 1), after=(1, 1))
    if setting.is_exact:
        sums = held(tuple((shard,) for shard in range(shards)), setting.present, (root(setting.present),))
    gradients = sums.most * facts.gradient_bytes
    memory = Memory(
        **setting.between_steps(facts.weights, copies=1),
        gradients=gradients,
        activations=passes(facts, facts.weights, range(len(facts.blocks)), sums=sums) - gradients,
        communication=0,
        start=setting.start_bytes(),
    )
    times = Times(
        compute=shards * seconds.passes,
        fetch=shards * seconds.fetch,
        exchange=0.0,
        idle=0.0,
        update=seconds.update,
    )
    return Forecast(memory=memory, sent_bytes=0, times=times)
