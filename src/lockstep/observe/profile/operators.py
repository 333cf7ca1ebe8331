"""The most expensive operators of a trace, each with the line of Python that called it.

The profiler gives an operator of the backward pass the stack of the forward operator that it differentiates.
"""

import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = Path(__file__).parents[2]
STANDARD = Path(sysconfig.get_path("stdlib"))
BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, kw_only=True)
class Operator:
    name: str
    line: str
    """FILE:LINE FUNCTION; empty where none is known."""
    seconds: float
    """Seconds without the operators that it called."""
    calls: int


def most_expensive(events: Iterable[Any], count: int = 3) -> list[Operator]:
    """List the operators with most time of their own: on the GPU where they ran there, else on the CPU."""
    operators = [event for event in events if event.name.startswith("aten::")]
    seconds, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    is_on_gpu = any(event.self_device_time_total for event in operators)
    for event in operators:
        key = event.name.removeprefix("aten::"), _line(event)
        seconds[key] += (event.self_device_time_total if is_on_gpu else event.self_cpu_time_total) / 1e6
        calls[key] += 1
    return [
        Operator(name=name, line=line, seconds=taken, calls=calls[name, line])
        for (name, line), taken in seconds.most_common(count)
        if taken > 0
    ]


def _line(event: Any) -> str:
    """Return the line of an operator, or of the forward operator that it differentiates."""
    line, outer = caller(event.stack), event
    while outer is not None:
        if outer.name.startswith(BACKWARD):
            return f"{line}, backward" if line else "backward"
        outer = outer.cpu_parent
    return line


def caller(stack: Sequence[str] | None) -> str:
    """Return the innermost line that is neither PyTorch's, Python's nor Lockstep's own, such as "model.py:12 forward".
    `stack`: "FILE(LINE): FUNCTION", the innermost first; files in a folder of imports are relative to it."""
    for frame in stack or ():
        path, _, rest = frame.partition("(")
        number, _, function = rest.partition("): ")
        if path.endswith(".py") and number.isdecimal() and not _is_library(Path(path)):
            return f"{path}:{number} {function}"
    return ""


def _is_library(path: Path) -> bool:
    """Return whether a file is PyTorch's, Python's, or Lockstep's and not one of its models."""
    if not path.is_absolute():
        is_own = path.parts[0] == "lockstep" and path.parts[:2] != ("lockstep", "models")
        return is_own or path.parts[0] == "torch" or (STANDARD / path).is_file()
    if path.is_relative_to(OWN):
        return not path.is_relative_to(OWN / "models")
    return "torch" in path.parts if "site-packages" in path.parts else path.is_relative_to(STANDARD)
