"""Writes large tensors in chunks of rows, so that a reader of one shard never holds the whole tensor."""

from typing import Any

import torch
from torch import Tensor

from lockstep.core.modules.dtensors import global_offset, is_dtensor, local_tensor

CHUNK_BYTES = 8 << 20
"""Of a chunk, as far as whole rows allow. Reading takes this much memory besides the target."""


class RowChunks(Tensor):
    """A tensor that DCP writes in chunks of rows: see torch.distributed._checkpointable."""

    offset: torch.Size
    """Where it begins in the full tensor."""
    full_size: torch.Size

    @property
    def _rows_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES * len(self) // self.nbytes)

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        rows = self._rows_per_chunk
        return [self._item(fqn, first, min(rows, len(self) - first)) for first in range(0, len(self), rows)]

    def _item(self, fqn: str, first: int, rows: int) -> Any:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offset = torch.Size([self.offset[0] + first, *self.offset[1:]])
        chunk = ChunkStorageMetadata(offsets=offset, sizes=torch.Size([rows, *self.shape[1:]]))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.full_size)
        return WriteItem(index=MetadataIndex(fqn, offset), type=WriteItemType.SHARD, tensor_data=data)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        first = index.offset[0] - self.offset[0]
        return self.as_subclass(Tensor)[first : first + self._rows_per_chunk]


def in_row_chunks(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's shard of a DTensor, as DCP is to write it."""
    local = local_tensor(tensor)
    if local.nbytes <= CHUNK_BYTES or not local.ndim:
        return tensor
    chunks: Any = local.as_subclass(RowChunks)
    chunks.offset = torch.Size(global_offset(tensor) if is_dtensor(tensor) else [0] * local.ndim)
    chunks.full_size = tensor.shape
    return chunks
