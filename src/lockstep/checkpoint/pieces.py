"""Large tensors are written as runs of their rows, so that whoever reads a part of one never holds the whole."""

from typing import Any

import torch
from torch import Tensor

from lockstep.core.modules.dtensors import is_spread, offset_of, part_of

BYTES = 8 << 20
"""Of a piece, as far as whole rows allow. Reading takes this much memory besides what is read into."""


class RowPieces(Tensor):
    """A tensor that DCP writes piece by piece: see torch.distributed._checkpointable."""

    origin: torch.Size
    """Where it begins in the whole."""
    whole: torch.Size

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        rows = max(1, BYTES * len(self) // self.nbytes)
        return [self._item(fqn, first, min(rows, len(self) - first)) for first in range(0, len(self), rows)]

    def _item(self, fqn: str, first: int, rows: int) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offset = torch.Size([self.origin[0] + first, *self.origin[1:]])
        chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size([rows, *self.shape[1:]]))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.whole)
        return WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        first = index.offset[0] - self.origin[0]
        plain = self.as_subclass(Tensor)
        return plain[first : first + max(1, BYTES * len(self) // self.nbytes)]


def in_pieces(tensor: Tensor) -> Tensor:
    """A tensor, or a rank's part of one, as it is to be written."""
    part = part_of(tensor)
    if part.nbytes <= BYTES or not part.ndim:
        return tensor
    pieces: Any = part.as_subclass(RowPieces)
    pieces.origin = torch.Size(offset_of(tensor) if is_spread(tensor) else [0] * part.ndim)
    pieces.whole = tensor.shape
    return pieces
