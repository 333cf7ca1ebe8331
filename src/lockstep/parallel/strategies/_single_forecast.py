"""Forecast of `single`: one process, no communication."""

from lockstep.base.errors import LaunchError
from lockstep.parallel.forecast import Forecast, PartialSums, Setting, peak_of_passes, sequential_sums


def forecast(setting: Setting) -> Forecast:
    """Return the forecast of the whole model with every shard. Raises LaunchError for more than one process."""
    if setting.cluster.world > 1:
        raise LaunchError("it runs one process")
    facts = setting.facts
    in_place = PartialSums(before=(0, 1), after=(1, 1))
    sums = sequential_sums(setting.present, setting.present) if setting.is_exact else in_place
    gradients = sums.most * facts.gradient_bytes
    memory = setting.memory(
        facts.weights,
        copies=1,
        gradients=gradients,
        activations=peak_of_passes(facts, facts.weights, range(len(facts.blocks)), sums=sums) - gradients,
        communication=0,
    )
    return Forecast(memory=memory, sent_bytes=0, times=setting.times(setting.shards, 0.0))
