"""Checks that replicas still hold the same weights, as they must after every step."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.base.errors import Desync
from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.host.activity import waiting_in
from lockstep.core.numerics.checksum import checksum
from lockstep.observe.diagnose.hang_verdict import ranks_text

MOST_NAMED = 3


class RankComparison:
    """Compares parameters, or shards of them, between the ranks that hold the same ones as this one, `copies`."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], step: int, copies: Sequence[int]) -> None:
        held = list(parameters)
        self.names, self.tensors = [name for name, _ in held], [tensor for _, tensor in held]
        self.copies = tuple(copies)
        self.equal_at = step
        """The last step at which all ranks were found equal."""

    def check(self, step: int) -> None:
        """Raise Desync on all ranks if any differ after a step."""
        if dist.get_world_size() == 1:
            return
        own = torch.stack([checksum(tensor) for tensor in self.tensors]).tolist() if self.tensors else []
        with waiting_in("the comparison of weights"):
            everyone = all_gather_object((self.copies, self.names, own))
        groups = {copies: (names, [everyone[rank][2] for rank in copies]) for copies, names, _ in everyone}
        differing = [
            _line(name, dict(zip(copies, sums, strict=True)))
            for copies, (names, rows) in groups.items()
            for name, *sums in zip(names, *rows, strict=True)
            if len(set(sums)) > 1
        ]
        if not differing:
            self.equal_at = step
            return
        more = f"\n  and {len(differing) - MOST_NAMED} more parameters" if len(differing) > MOST_NAMED else ""
        raise Desync(
            f"the ranks' weights are no longer equal, first seen after step {step} (equal after step {self.equal_at}):"
            "\n  "
            + "\n  ".join(differing[:MOST_NAMED])
            + more
            + "\n  Something changes parameters on some ranks only (code that asks for the rank, a forward pass that "
            "writes to them), or a device computes wrongly.",
            self.equal_at,
        )


def _line(name: str, sums: dict[int, int]) -> str:
    """Name the ranks that differ from the majority; all where there is none."""
    (usual, count), *_ = Counter(sums.values()).most_common()
    others = [rank for rank, value in sums.items() if value != usual]
    if 2 * count <= len(sums):
        return f"{name}: {ranks_text(list(sums))} differ"
    verb = "differs" if len(others) == 1 else "differ"
    same = [rank for rank, value in sums.items() if value == usual]
    return f"{name}: {ranks_text(others)} {verb} from {ranks_text(same)}"
