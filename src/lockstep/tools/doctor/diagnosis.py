"""What `lockstep doctor` finds."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Diagnosis(BaseModel):
    """One line of cause, one of repair."""

    model_config = ConfigDict(frozen=True)

    code: str
    """Such as LS-NET-03; listed in docs/troubleshooting.md."""
    severity: Literal["error", "warning", "note"]
    """error: the run will not start, or not end well; warning: it will be slow or fragile; note: worth knowing."""
    cause: str
    repair: str
    host: str = ""
    """The machine, where several are looked at."""
