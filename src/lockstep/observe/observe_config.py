"""The settings of observing a run."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from lockstep.base import plugins
from lockstep.base.config import MANY, LocalPath, Section
from lockstep.base.errors import nearest


class ObserveSection(Section):
    """Output and diagnosis of a run while it trains."""

    sinks: tuple[str, ...] = ("progress", "jsonl", "tensorboard")
    """Sinks that get the events; `lockstep plugins` lists them."""
    log_every: int = Field(10, ge=1, le=MANY)
    """Read loss and metrics from the device every this many steps (reading waits for the device)."""
    hang_seconds: Annotated[float, Field(ge=0.1, le=MANY)] | Literal["auto"] = "auto"
    """Time without progress after which all processes' stacks are collected and the rank that the others wait for is
    named; auto: ten times the median step, at least 30 s."""
    on_hang: Literal["report", "restart"] = "report"
    """Only report it, or also restart the processes from the newest checkpoint (with launch.recovery=live: only those
    that the others wait for)."""
    desync_every: int | None = Field(200, ge=1, le=MANY)
    """Compare the weights of all processes every this many steps, and stop if they are not equal."""
    recheck: float | None = Field(None, gt=0, le=1)
    """Share of the steps in which each shard is computed once more by another process, on another machine where there
    is one, to find a process that computes wrongly before the weights are updated; it costs a little more than that
    share of the time."""
    on_corruption: Literal["leave", "stop", "warn"] = "leave"
    """Handling of a process that computes wrongly. leave: it leaves the run where that recovers live, else stop;
    stop: the run ends with an error; warn: the run goes on with the right gradients."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """[FIRST, LAST]: steps under the PyTorch profiler, written to profile/trace-rank-N.json.gz in the run's folder."""
    file: LocalPath | None = None
    """A Python file of your own with `observers(options)`: a list of objects with notice(event) and close();
    they get all events, on rank 0."""
    options: dict[str, Any] = {}
    """Options for that file."""

    @field_validator("profile_steps")
    @classmethod
    def _check_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and steps[1] < steps[0]:
            raise ValueError(f"should be the first and the last step, such as [100, 105], not {list(steps)}")
        return steps

    @field_validator("sinks")
    @classmethod
    def _check_sinks(cls, sinks: tuple[str, ...]) -> tuple[str, ...]:
        known = plugins.names("observe.sinks")
        for sink in sinks:
            if sink not in known:
                raise ValueError(f"there is no sink {sink!r}{nearest(sink, known)} (there is: {', '.join(known)})")
        return sinks
