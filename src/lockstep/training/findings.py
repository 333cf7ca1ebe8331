"""What was noticed of a user's code: where it is, what it does to the promise, and how to mend it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: str
    """state, buffer, parameter, random, process, data or loss; memory: a state of which only the effect was seen."""
    where: str
    """A module's dotted name with class, file and line; or what else it is found in."""
    sentence: str
    """What was seen, what follows from it, and how to mend it."""
    leaves_promise: bool = True
    """Whether the weights may depend on the number of processes, or change with a resume."""

    def plain(self) -> dict[str, Any]:
        return {"kind": self.kind, "where": self.where, "what": self.sentence, "leaves_promise": self.leaves_promise}
