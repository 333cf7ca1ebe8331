"""Whether all ranks still hold the same weights, as they must after every step."""

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.diagnose.verdict import ranks_text
from lockstep.errors import Desync
from lockstep.runtime.collectives import stacked
from lockstep.runtime.whereabouts import waiting_in

NAMED = 3
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits as integers, int64 0-dim: one changed bit always changes it, and the order does not."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().view(INTEGERS[plain.element_size()]).sum(dtype=torch.int64)


class Comparison:
    """Compares the parameters that every rank holds whole; what is sharded belongs to one rank alone."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
        whole = [(name, tensor) for name, tensor in parameters if not isinstance(tensor, DTensor)]
        self.names, self.tensors = [name for name, _ in whole], [tensor for _, tensor in whole]
        self.equal_at = step
        """The last step at which all ranks are known to have been equal."""

    def check(self, step: int) -> None:
        """Raise Desync, on all ranks, where they differ after a step."""
        if dist.get_world_size() == 1 or not self.tensors:
            return
        own = torch.stack([checksum(tensor) for tensor in self.tensors]).cpu()
        with waiting_in("the comparison of weights"):
            table = stacked(own)
        differing = [place for place in range(table.shape[1]) if len(table[:, place].unique()) > 1]
        if not differing:
            self.equal_at = step
            return
        lines = [_line(self.names[place], table[:, place].tolist()) for place in differing[:NAMED]]
        more = f"\n  and {len(differing) - NAMED} more parameters" if len(differing) > NAMED else ""
        raise Desync(
            f"the ranks' weights have come apart, first seen after step {step} (equal after step {self.equal_at}):\n  "
            + "\n  ".join(lines)
            + more
            + "\n  Something changes parameters on some ranks only (code that asks for the rank, a forward pass that "
            "writes to them), or a device computes wrongly.",
            self.equal_at,
        )


def _line(name: str, sums: list[int]) -> str:
    """Who differs from the majority; where there is none, that they differ."""
    (usual, count), *_ = Counter(sums).most_common()
    others = [rank for rank, value in enumerate(sums) if value != usual]
    if 2 * count <= len(sums):
        return f"{name}: {ranks_text(range(len(sums)))} differ"
    verb = "differs" if len(others) == 1 else "differ"
    same = [rank for rank, value in enumerate(sums) if value == usual]
    return f"{name}: {ranks_text(others)} {verb} from {ranks_text(same)}"
