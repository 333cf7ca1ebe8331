"""Reads DCP's .metadata, a pickle, without importing or calling what it names.

Only opcodes and names that DCP itself writes are accepted. Each named class becomes a plain record, and the result is
checked against the files beside it. torch's weights-only unpickler does not fit: it reads pickle protocol 2, DCP writes
a newer one.
"""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lockstep.base import storage

FILE = ".metadata"
MOST_BYTES = 256 << 20
"""Size limit of the file: enough for ten terabytes of tensors."""
ALWAYS_ALLOWED_BYTES = 16 << 20
"""Size of the file that is always allowed; 1/64 of the size of all files is added to it."""
MOST_AXES = 64
LARGEST = 2**53
OPCODES = """
PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
SHORT_BINUNICODE BINUNICODE EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS
STACK_GLOBAL NEWOBJ REDUCE BUILD
"""
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
Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class TensorType:
    """A tensor's type and shape, and the chunks in which it was written."""

    dtype: str
    size: Shape
    chunks: tuple[tuple[Shape, Shape], ...]
    """Offsets and sizes of each."""


@dataclass(frozen=True)
class ChunkLocation:
    name: str
    """Name of the tensor."""
    offset: Shape | None
    """Offset in the tensor."""
    number: int | None
    file: str
    start: int
    """Offset in the file."""
    length: int


@dataclass(frozen=True)
class TensorTable:
    """Tensors of a checkpoint, and the places of their chunks."""

    tensors: Mapping[str, TensorType]
    locations: tuple[ChunkLocation, ...]


class PickledObject:
    """Stands for any object that DCP writes, with its state as it was written."""

    name = ""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """Return an attribute of the object. Raises ValueError where there is none."""
        if not isinstance(self.state, dict) or key not in self.state:
            raise ValueError(f"a {self.name} has no {key}")
        return self.state[key]


def _records(module: str, names: str) -> dict[tuple[str, str], type[PickledObject]]:
    return {(module, name): type(name, (PickledObject,), {"name": name}) for name in names.split()}


RECORDS = {
    **_records(
        "torch.distributed.checkpoint.metadata",
        "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta "
        "_MEM_FORMAT_ENCODING",
    ),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_records("torch.serialization", "_get_layout"),
    **_records("torch", "Size"),
}


class Reader(pickle._Unpickler):
    """Python's unpickler with most opcodes removed, so that its memory is bounded by the file's size."""

    dispatch: ClassVar[dict[int, Any]] = {
        key: pickle._Unpickler.dispatch[key] for key in (getattr(pickle, o)[0] for o in OPCODES.split())
    }
    stack: list[Any]

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def _set_items(self) -> None:
        """Set the items on the stack since the last mark."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}

    def find_class(self, module: str, name: str) -> Any:
        """Return a record class, or the name of a dtype. Raises ValueError."""
        if module == "torch" and name in DTYPES:
            return name
        if module.partition(".")[0] == "pathlib":  # the path where it was written
            return PickledObject
        if (module, name) not in RECORDS:
            raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")
        return RECORDS[module, name]


def read(folder: Path) -> TensorTable:
    """Read the metadata of a checkpoint.

    Raises ValueError where it is damaged, names anything but tensors, or does not fit the files beside it; OSError.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    text = storage.read_regular(folder / FILE, min(MOST_BYTES, ALWAYS_ALLOWED_BYTES + sum(sizes.values()) // 64))
    try:
        return _table(Reader(io.BytesIO(text)).load(), sizes)
    except ValueError as error:
        raise ValueError(f"{FILE} cannot be used: {error}") from None
    except Exception as error:  # an unpickler may raise anything for damaged bytes
        raise ValueError(f"{FILE} is damaged ({type(error).__name__}: {error})") from None


def _table(raw: Any, sizes: Mapping[str, int]) -> TensorTable:
    metadata = _record(raw, "Metadata")
    entries = _expect(metadata.get("state_dict_metadata"), dict)
    tensors = {_expect(name, str): _tensor_type(entry) for name, entry in entries.items()}
    storage_data = _expect(metadata.get("storage_data"), dict)
    locations = tuple(_location(index, info, sizes) for index, info in storage_data.items())
    _refuse_overlap(locations)
    stored = dict.fromkeys(tensors, 0)
    for location in locations:
        if location.name not in stored:
            raise ValueError(f"it has bytes of {location.name!r}, but no such tensor")
        stored[location.name] += location.length
    for name, kind in tensors.items():  # they are stored uncompressed
        needed = math.prod(kind.size) * DTYPES[kind.dtype]
        if needed > stored[name]:
            raise ValueError(f"{name!r} should have {needed:,} bytes, but {stored[name]:,} are there")
    return TensorTable(tensors, locations)


def _refuse_overlap(locations: Iterable[ChunkLocation]) -> None:
    """Raise ValueError where bytes belong to two chunks: a small file could claim tensors of any size."""
    ends: dict[str, int] = {}
    for location in sorted(locations, key=lambda location: (location.file, location.start)):
        end = ends.get(location.file, 0)
        if location.length and location.start < end:
            raise ValueError(f"two pieces share bytes of {location.file}")
        ends[location.file] = max(end, location.start + location.length)


def _tensor_type(raw: Any) -> TensorType:
    entry = _record(raw, "TensorStorageMetadata")
    size, properties = _shape(entry.get("size")), _record(entry.get("properties"), "TensorProperties").state
    if not isinstance(properties, tuple) or not properties or not isinstance(properties[0], str):
        raise ValueError("a tensor has no dtype")
    if properties[0] not in DTYPES:
        raise ValueError("a tensor has an unknown dtype")
    records = [_record(chunk, "ChunkStorageMetadata") for chunk in _expect(entry.get("chunks"), list)]
    chunks = tuple((_shape(chunk.get("offsets")), _shape(chunk.get("sizes"))) for chunk in records)
    if not all(_is_inside(size, *chunk) for chunk in chunks):
        raise ValueError("a piece of a tensor is not inside of it")
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(size):
        raise ValueError("a tensor's pieces are not the whole of it")
    return TensorType(properties[0], size, chunks)


def _is_inside(full: Shape, offsets: Shape, sizes: Shape) -> bool:
    if not len(full) == len(offsets) == len(sizes):
        return False
    return all(offset + size <= most for most, offset, size in zip(full, offsets, sizes, strict=True))


def _location(raw_index: Any, raw_info: Any, sizes: Mapping[str, int]) -> ChunkLocation:
    index, info = _record(raw_index, "MetadataIndex"), _record(raw_info, "_StorageInfo")
    file, start, length = _expect(info.get("relative_path"), str), _size(info.get("offset")), _size(info.get("length"))
    if file not in sizes:
        raise ValueError(f"it names {file!r}, which is no file of this checkpoint")
    if start + length > sizes[file]:
        raise ValueError(f"it names bytes beyond the end of {file}")
    if info.state.get("transform_descriptors"):
        raise ValueError("it names a transformation of files")
    offset, number = index.get("offset"), index.get("index")
    return ChunkLocation(
        name=_expect(index.get("fqn"), str),
        offset=None if offset is None else _shape(offset),
        number=None if number is None else _size(number),
        file=file,
        start=start,
        length=length,
    )


def _key(raw: Any) -> Any:
    if not isinstance(raw, str | int | PickledObject):
        raise ValueError("a key is no name")  # hashing deeply nested tuples would overflow the C stack
    return raw


def _record(raw: Any, name: str) -> PickledObject:
    if not isinstance(raw, PickledObject) or raw.name != name:
        raise ValueError(f"something is no {name}")
    return raw


def _expect(raw: Any, kind: type[T]) -> T:
    if not isinstance(raw, kind):
        raise ValueError(f"something is no {kind.__name__}")
    return raw


def _size(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= LARGEST:
        raise ValueError("something is no size")
    return raw


def _shape(raw: Any) -> Shape:
    axes: Any = _record(raw, "Size").state
    if isinstance(axes, tuple) and len(axes) == 1 and isinstance(axes[0], Iterable):
        (axes,) = axes
    if not isinstance(axes, tuple) or len(axes) > MOST_AXES:
        raise ValueError("something is no shape")
    return tuple(_size(axis) for axis in axes)
