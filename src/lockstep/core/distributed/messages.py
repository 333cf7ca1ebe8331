"""Values as bytes, for other processes of the run: JSON, and behind it the contents of tensors and arrays.

Reading them executes nothing, unlike unpickling: of classes, only dataclasses, named tuples, mappings, enums and
Lockstep's errors that this process has imported are made again, from their contents, without a call of __init__.
"""

import json
import sys
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.base.errors import LockstepError, ModelError
from lockstep.base.remote_path import parsed

MOST_JSON_BYTES = 1 << 28
"""Limit of the bytes of the values in a message, without the contents of tensors."""
HEAD = 8
"""Number of bytes before the JSON, which hold its length."""
AS_IS = (type(None), bool, int, float, str)
OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
OF_OPERATIONS = "torch.return_types"
SEQUENCES: dict[str, Any] = {"Size": torch.Size, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any) -> Tensor:
    """Encode a value as a message, uint8 [bytes]; for what cannot be sent, one whose readers get a ModelError."""
    contents: list[Tensor] = []
    try:
        text = json.dumps(_plain(value, contents), check_circular=False).encode()
        if len(text) > MOST_JSON_BYTES:
            raise ModelError(f"{len(text):,} bytes are too much to send as values: return tensors")
    except Exception as error:  # of a tensor without values, say; the others wait for a message
        contents, text = [], json.dumps({"failure": str(error)}).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(HEAD, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *contents])


def decode(message: Tensor) -> Any:
    """Decode a message, uint8 [bytes]. Raises the sender's ModelError, ValueError for damaged messages."""
    size = int.from_bytes(bytes(message[:HEAD].tolist()), "little")
    if size > min(MOST_JSON_BYTES, len(message)):
        raise _damaged()
    return _Reader(message[HEAD + size :]).value(json.loads(message[HEAD : HEAD + size].numpy().tobytes()))


def _plain(value: Any, contents: list[Tensor]) -> Any:
    """Convert a value to JSON's types: a dict {kind: ...} for all that JSON has no form for. Adds to `contents`."""
    kind = type(value)
    if kind in AS_IS:
        return value
    if isinstance(value, dict):
        pairs = [[_plain(key, contents), _plain(each, contents)] for key, each in value.items()]
        return {"dict": pairs} if kind is dict else {"mapping": [*_name_of(kind), pairs]}
    if isinstance(value, list | tuple | set | frozenset):
        values = [_plain(each, contents) for each in value]
        if kind is list:
            return values
        if hasattr(kind, "_fields") or kind.__module__ == OF_OPERATIONS:
            return {"named": [*_name_of(kind), values]}
        if kind not in SEQUENCES.values():
            raise _unsendable(value)
        return {next(name for name, each in SEQUENCES.items() if kind is each): values}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _content(value, contents)
    return _object(value, contents)


def _content(value: Any, contents: list[Tensor]) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        order = sorted(range(plain.ndim), key=lambda axis: -int(plain.stride()[axis]))  # keeps channels_last, for one
        tensor = plain.permute(order).contiguous()
        contents.append(tensor.reshape(-1).view(torch.uint8))
        return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), order]}
    is_array = type(value) is np.ndarray
    if not (is_array or isinstance(value, np.generic)) or value.dtype.hasobject or value.dtype.names:
        raise _unsendable(value)
    contents.append(torch.tensor(bytearray(value.tobytes()), dtype=torch.uint8))
    return {"array": [value.dtype.str, list(value.shape), is_array]}


def _object(value: Any, contents: list[Tensor]) -> Any:
    kind = type(value)
    if isinstance(value, LockstepError):
        kinds = [[each.__module__, each.__qualname__] for each in kind.__mro__]
        return {"error": [kinds, _plain([value.args, vars(value)], contents)]}
    if is_dataclass(value):
        return {"object": [*_name_of(kind), [_plain(getattr(value, each.name), contents) for each in fields(value)]]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, OF_TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Enum):
        return {"enum": [*_name_of(kind), value.name]}
    if isinstance(value, str):
        return str.__str__(value)
    raise _unsendable(value)


class _Reader:
    def __init__(self, contents: Tensor) -> None:
        self.contents = contents

    def value(self, plain: Any) -> Any:
        """Invert `_plain`."""
        if isinstance(plain, list):
            return [self.value(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.value(inner))
        return getattr(self, f"_{kind}")(inner)

    def _failure(self, text: str) -> None:
        raise ModelError(text)

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        return {self.value(key): self.value(each) for key, each in pairs}

    def _mapping(self, inner: Any) -> Any:
        """Make a mapping, with the attributes of a dataclass, as transformers' outputs have them."""
        kind = _known(inner, dict)
        made, pairs = kind.__new__(kind), self._dict(inner[2])
        for key, each in pairs.items():
            (OrderedDict if isinstance(made, OrderedDict) else dict).__setitem__(made, key, each)
        for field in fields(kind) if is_dataclass(kind) else ():
            object.__setattr__(made, field.name, pairs.get(field.name))
        return made

    def _named(self, inner: Any) -> Any:
        kind, values = _known(inner, tuple), self.value(inner[2])
        return kind(values) if kind.__module__ == OF_OPERATIONS else tuple.__new__(kind, values)

    def _tensor(self, inner: Any) -> Tensor:
        tensor = torch.empty(inner[1], dtype=getattr(torch, inner[0]))
        content, self.contents = self.contents[: tensor.nbytes], self.contents[tensor.nbytes :]
        tensor.reshape(-1).view(torch.uint8).copy_(content)
        return tensor.permute([inner[2].index(axis) for axis in range(tensor.ndim)])

    def _array(self, inner: Any) -> Any:
        dtype = np.dtype(inner[0])
        content = self._tensor(["uint8", [dtype.itemsize * int(np.prod(inner[1]))], [0]])
        array = content.numpy().view(dtype).reshape(inner[1])
        return array if inner[2] else array[()]

    def _error(self, inner: Any) -> LockstepError:
        """Make an error of the most specific kind that this process has imported."""
        args, attributes = self.value(inner[1])
        kind = next(found for each in inner[0] if (found := _class(each[0], each[1], LockstepError)))
        error: LockstepError = kind.__new__(kind, *args)
        vars(error).update(attributes)
        return error

    def _object(self, inner: Any) -> Any:
        kind = _known(inner, object)
        made: Any = object.__new__(kind)
        for field, each in zip(fields(kind), inner[2], strict=True):
            object.__setattr__(made, field.name, self.value(each))
        return made

    def _bytes(self, text: str) -> bytes:
        return text.encode("latin-1")

    def _torch(self, name: str) -> Any:
        found = getattr(torch, name)
        if not isinstance(found, OF_TORCH):
            raise _damaged()
        return found

    def _path(self, text: str) -> Path:
        return parsed(text)

    def _enum(self, inner: Any) -> Any:
        return _known(inner, Enum)[inner[2]]


def _name_of(kind: type) -> tuple[str, str]:
    """Return the name of a class, for `_class`. Raises ModelError for one that no other process could find."""
    if _class(kind.__module__, kind.__qualname__, kind) is not kind:
        raise _unsendable(kind)
    return kind.__module__, kind.__qualname__


def _class(module: str, name: str, base: type) -> Any:
    """Find a class that this process has imported, and that is derived from `base`."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _known(named: list[Any], base: type) -> Any:
    if (found := _class(named[0], named[1], base)) is None:
        raise _damaged()
    return found


def _damaged() -> ValueError:
    return ValueError("a message of another process is damaged")


def _unsendable(value: Any) -> ModelError:
    kind = value if isinstance(value, type) else type(value)
    return ModelError(
        f"a {kind.__name__} cannot be sent from one process to another: return dense tensors, arrays, numbers, texts, "
        "and lists, tuples, sets and dicts of these"
    )
