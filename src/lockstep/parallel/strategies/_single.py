"""The strategy of parallel.kind=single."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from lockstep.base.errors import LaunchError
from lockstep.base.model_contracts import Batch, Model
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness
from lockstep.parallel.replicated import Stepwise
from lockstep.parallel.strategies.single import Config


class Single(Stepwise):
    """The whole model, every shard, no communication."""

    def place(self, model: Model, sample: Callable[[], Batch]) -> nn.Module:
        """Keep the model as it is; raises LaunchError when there is more than one process."""
        if dist.get_world_size() > 1:
            what = f"parallel.kind=single runs one process, but there are {dist.get_world_size()}"
            raise LaunchError(f"{what}: set parallel.kind=ddp or launch.processes=1")
        return super().place(model, sample)


def build(config: Config, *, randomness: Randomness, precision: Precision, exact: bool) -> Single:
    return Single(randomness, precision, exact=exact)
