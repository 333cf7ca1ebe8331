"""A checkpoint's table of tensors: DCP's .metadata, a pickle that is read without importing or calling what it names.

Only the opcodes and the names that DCP itself writes are known; each name becomes a plain record of this module, and
what comes out is checked against the files beside it.
"""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lockstep.base import storage

FILE = ".metadata"
MOST_BYTES = 256 << 20
"""Of the table: enough for ten terabytes of tensors."""
LEAST_BYTES = 16 << 20
"""The table of a small checkpoint may have so many, of a larger one also a part of what lies beside it ..."""
PART = 64
"""... one of so many."""
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


@dataclass(frozen=True)
class TensorType:
    """Of a tensor: what it is, and the pieces that it was written in."""

    dtype: str
    size: Shape
    pieces: tuple[tuple[Shape, Shape], ...]
    """(offsets, sizes) of each."""


@dataclass(frozen=True)
class PieceLocation:
    name: str
    offset: Shape | None
    """In the tensor."""
    number: int | None
    file: str
    start: int
    """In the file."""
    length: int


@dataclass(frozen=True)
class TensorTable:
    """All that DCP has to know to read a checkpoint."""

    tensors: Mapping[str, TensorType]
    places: tuple[PieceLocation, ...]


class PickledObject:
    """In the place of any object that DCP writes: its state, as it was written."""

    name = ""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, key: str) -> Any:
        """An attribute of the object. Raises ValueError where there is none."""
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
    """The unpickler in Python, whose opcodes can be taken away, and whose memory grows with the file alone."""

    dispatch: ClassVar[dict[int, Any]] = {
        key: pickle._Unpickler.dispatch[key] for key in (getattr(pickle, o)[0] for o in OPCODES.split())
    }
    stack: list[Any]

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def _set_items(self) -> None:
        """Those that lie on the stack since the last mark."""
        items = self.pop_mark()  # type: ignore[attr-defined]
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}

    def find_class(self, module: str, name: str) -> Any:
        """A record, or the name of a dtype. Raises ValueError."""
        if module == "torch" and name in DTYPES:
            return name
        if module.partition(".")[0] == "pathlib":  # where it was written
            return PickledObject
        if (module, name) not in RECORDS:
            raise ValueError(f"it names {module}.{name}, which is not part of a checkpoint")
        return RECORDS[module, name]


def read(folder: Path) -> TensorTable:
    """The table of a checkpoint.

    Raises ValueError for one that is damaged, names anything but tensors, or does not fit the files beside it; OSError.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    text = storage.read(folder / FILE, min(MOST_BYTES, LEAST_BYTES + sum(sizes.values()) // PART))
    try:
        return _table(Reader(io.BytesIO(text)).load(), sizes)
    except ValueError as error:
        raise ValueError(f"{FILE} cannot be used: {error}") from None
    except Exception as error:  # whatever an unpickler raises about damaged bytes
        raise ValueError(f"{FILE} is damaged ({type(error).__name__}: {error})") from None


def _table(raw: Any, sizes: Mapping[str, int]) -> TensorTable:
    table = _of(raw, "Metadata")
    tensors = {_text(name): _kind(entry) for name, entry in _dict(table.get("state_dict_metadata")).items()}
    places = tuple(_place(index, place, sizes) for index, place in _dict(table.get("storage_data")).items())
    _refuse_overlap(places)
    stored = dict.fromkeys(tensors, 0)
    for place in places:
        if place.name not in stored:
            raise ValueError(f"it has bytes of {place.name!r}, but no such tensor")
        stored[place.name] += place.length
    for name, kind in tensors.items():  # they lie in the files uncompressed
        needed = math.prod(kind.size) * DTYPES[kind.dtype]
        if needed > stored[name]:
            raise ValueError(f"{name!r} should have {needed:,} bytes, but {stored[name]:,} are there")
    return TensorTable(tensors, places)


def _refuse_overlap(places: Iterable[PieceLocation]) -> None:
    """Raise ValueError where bytes belong to two pieces: a small file could claim tensors of any size."""
    ends: dict[str, int] = {}
    for place in sorted(places, key=lambda place: (place.file, place.start)):
        if place.length and place.start < ends.get(place.file, 0):
            raise ValueError(f"two pieces share bytes of {place.file}")
        ends[place.file] = max(ends.get(place.file, 0), place.start + place.length)


def _kind(raw: Any) -> TensorType:
    entry = _of(raw, "TensorStorageMetadata")
    size, properties = _shape(entry.get("size")), _of(entry.get("properties"), "TensorProperties").state
    if not isinstance(properties, tuple) or not properties or not isinstance(properties[0], str):
        raise ValueError("a tensor has no dtype")
    if properties[0] not in DTYPES:
        raise ValueError("a tensor has an unknown dtype")
    chunks = [_of(chunk, "ChunkStorageMetadata") for chunk in _list(entry.get("chunks"))]
    pieces = tuple((_shape(chunk.get("offsets")), _shape(chunk.get("sizes"))) for chunk in chunks)
    if not all(_is_inside(size, *piece) for piece in pieces):
        raise ValueError("a piece of a tensor is not inside of it")
    if sum(math.prod(sizes) for _, sizes in pieces) != math.prod(size):
        raise ValueError("a tensor's pieces are not the whole of it")
    return TensorType(properties[0], size, pieces)


def _is_inside(whole: Shape, offsets: Shape, sizes: Shape) -> bool:
    if not len(whole) == len(offsets) == len(sizes):
        return False
    return all(offset + size <= most for most, offset, size in zip(whole, offsets, sizes, strict=True))


def _place(index: Any, raw: Any, sizes: Mapping[str, int]) -> PieceLocation:
    key, place = _of(index, "MetadataIndex"), _of(raw, "_StorageInfo")
    file, start, length = _text(place.get("relative_path")), _number(place.get("offset")), _number(place.get("length"))
    if file not in sizes:
        raise ValueError(f"it names {file!r}, which is no file of this checkpoint")
    if start + length > sizes[file]:
        raise ValueError(f"it names bytes beyond the end of {file}")
    if place.state.get("transform_descriptors"):
        raise ValueError("it names a transformation of files")
    return PieceLocation(
        name=_text(key.get("fqn")),
        offset=None if key.get("offset") is None else _shape(key.get("offset")),
        number=None if key.get("index") is None else _number(key.get("index")),
        file=file,
        start=start,
        length=length,
    )


# ---- what a value has to be


def _key(raw: Any) -> Any:
    if not isinstance(raw, str | int | PickledObject):
        raise ValueError("a key is no name")  # the hash of tuples in tuples without end would end the process
    return raw


def _of(raw: Any, name: str) -> PickledObject:
    if not isinstance(raw, PickledObject) or raw.name != name:
        raise ValueError(f"something is no {name}")
    return raw


def _dict(raw: Any) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise ValueError("something is no dict")
    return raw


def _list(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise ValueError("something is no list")
    return raw


def _text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("something is no name")
    return raw


def _number(raw: Any) -> int:
    if type(raw) is not int or not 0 <= raw <= LARGEST:
        raise ValueError("something is no size")
    return raw


def _shape(raw: Any) -> Shape:
    axes: Any = _of(raw, "Size").state
    if isinstance(axes, tuple) and len(axes) == 1 and isinstance(axes[0], Iterable):
        (axes,) = axes
    if not isinstance(axes, tuple) or len(axes) > MOST_AXES:
        raise ValueError("something is no shape")
    return tuple(_number(axis) for axis in axes)
