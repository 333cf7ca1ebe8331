"""The table of a checkpoint's tensors: where each of their chunks lies. It is JSON, since DCP's own is a pickle, which
executes what it names; readers of PyTorch's find that one, too, which Lockstep never reads."""

import json
import math
import pickle
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from lockstep.base import storage
from lockstep.checkpoint.layout import Count, FileName

FILE, OF_TORCH = "tensors.json", ".metadata"
MOST_BYTES = 256 << 20
"""Size limit of the file: enough for ten terabytes of tensors."""
ALWAYS_ALLOWED_BYTES = 16 << 20
"""Size of the file that is always allowed; 1/64 of the size of all files is added to it."""
MOST_AXES = 64
DTYPES = {
    name: size
    for size, names in {
        1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
        2: "int16 uint16 float16 bfloat16",
        4: "int32 uint32 float32 complex32",
        8: "int64 uint64 float64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
"""Name in torch -> bytes of an element."""
Shape = Annotated[tuple[Count, ...], Field(max_length=MOST_AXES)]


class StoredChunk(NamedTuple):
    """A part of a tensor, and its place in a file."""

    offset: Shape
    """Index of its first element in the tensor."""
    shape: Shape
    file: FileName
    start: Count
    """Offset in the file, in bytes."""
    length: Count
    """Bytes in the file."""


class StoredTensor(NamedTuple):
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: Shape
    chunks: list[StoredChunk]


Table = Mapping[str, StoredTensor]


def written_chunks(plan: Any, results: Iterable[Any]) -> Table:
    """Return the table of what DCP's writer has written: `plan` is a SavePlan, `results` are its WriteResults."""
    places, table = {result.index: result.storage_data for result in results}, dict[str, StoredTensor]()
    for item in plan.items:
        data, place = item.tensor_data, places[item.index]
        dtype = str(data.properties.dtype).removeprefix("torch.")
        stored = table.setdefault(item.index.fqn, StoredTensor(dtype, tuple(data.size), []))
        offset, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        stored.chunks.append(StoredChunk(offset, shape, place.relative_path, place.offset, place.length))
    return table


def write(folder: Path, tables: Iterable[Table]) -> None:
    """Write what all ranks have written as one table, for all readers; of equal chunks the first. Raises OSError."""
    table: dict[str, StoredTensor] = {}
    for part in tables:
        for name, stored in part.items():
            known = table.setdefault(name, stored._replace(chunks=[])).chunks
            parts = {(chunk.offset, chunk.shape) for chunk in known}
            known += [chunk for chunk in stored.chunks if (chunk.offset, chunk.shape) not in parts]
    storage.write(folder / FILE, json.dumps(table))
    storage.write(folder / OF_TORCH, pickle.dumps(as_dcp(table)))


def read(folder: Path) -> Table:
    """Read the table of a checkpoint. Raises ValueError where it is damaged or does not fit the files; OSError."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if FILE not in sizes and OF_TORCH in sizes:
        raise ValueError(f"it has no {FILE}: a version of Lockstep before this one has written it")
    text = storage.read_regular(folder / FILE, min(MOST_BYTES, ALWAYS_ALLOWED_BYTES + sum(sizes.values()) // 64))
    try:
        table: Table = _schema().validate_json(text, strict=True)
        for name, stored in table.items():
            if reason := _problem(stored, sizes):
                raise ValueError(f"{name!r} {reason}")
        _refuse_overlap(chunk for stored in table.values() for chunk in stored.chunks)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"][:4])
        raise ValueError(f"{FILE} is damaged ({where[:99]}: {first['msg'][:99]})") from None
    except ValueError as error:
        raise ValueError(f"{FILE} cannot be used: {error}") from None
    return table


@cache
def _schema() -> TypeAdapter[Any]:
    return TypeAdapter(dict[str, StoredTensor])


def _problem(stored: StoredTensor, sizes: Mapping[str, int]) -> str | None:
    """Return why a tensor cannot be what the table says, if so."""
    for chunk in stored.chunks:
        axes = [*zip(stored.shape, chunk.offset, chunk.shape, strict=False)]
        if not len(stored.shape) == len(chunk.offset) == len(chunk.shape) or any(o + n > most for most, o, n in axes):
            return "has a chunk that is not inside of it"
        if chunk.file not in sizes:
            return f"is in {chunk.file!r}, which is no file of this checkpoint"
        if chunk.start + chunk.length > sizes[chunk.file]:
            return f"is in bytes beyond the end of {chunk.file}"
        if math.prod(chunk.shape) * DTYPES[stored.dtype] > chunk.length:  # they are stored uncompressed
            return f"has a chunk of {math.prod(chunk.shape):,} elements in {chunk.length:,} bytes"
    if sum(math.prod(chunk.shape) for chunk in stored.chunks) != math.prod(stored.shape):
        return "has chunks that are not the whole of it"
    return None


def _refuse_overlap(chunks: Iterable[StoredChunk]) -> None:
    """Raise ValueError where bytes belong to two chunks: a small file could claim tensors of any size."""
    ends: dict[str, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: (chunk.file, chunk.start)):
        end = ends.get(chunk.file, 0)
        if chunk.length and chunk.start < end:
            raise ValueError(f"two chunks share bytes of {chunk.file}")
        ends[chunk.file] = max(end, chunk.start + chunk.length)


def as_dcp(table: Table) -> Any:
    """Convert the table to DCP's Metadata."""
    import torch  # noqa: PLC0415 (a checkpoint is verified without it)
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return metadata.Metadata(
        state_dict_metadata={
            name: metadata.TensorStorageMetadata(
                properties=metadata.TensorProperties(dtype=getattr(torch, stored.dtype)),
                size=torch.Size(stored.shape),
                chunks=[
                    metadata.ChunkStorageMetadata(offsets=torch.Size(chunk.offset), sizes=torch.Size(chunk.shape))
                    for chunk in stored.chunks
                ],
            )
            for name, stored in table.items()
        },
        planner_data={name: (name,) for name in table},
        storage_data={
            metadata.MetadataIndex(name, torch.Size(chunk.offset)): _StorageInfo(chunk.file, chunk.start, chunk.length)
            for name, stored in table.items()
            for chunk in stored.chunks
        },
        storage_meta=metadata.StorageMeta(),
    )
