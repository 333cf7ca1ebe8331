"""Events of a run, as observers receive them."""

import pytest

from lockstep.base.events import (
    Evaluated,
    RunEnded,
    RunStarted,
    StepDone,
)


def started(folder, resumed_step=0, **changes):
    facts = {
        **{"name": "trial", "folder": folder, "resumed_step": resumed_step, "total_steps": 20, "steps_per_epoch": 5},
        **{"world_size": 2, "device": "CPU", "parameters": 12345, "train_samples": 1000},
    }
    return RunStarted(**{**facts, **changes})


def step(number, **values):
    return StepDone(step=number, epoch=(number - 1) // 5 + 1, values=values)


def evaluated(number):
    return Evaluated(step=number, epoch=number // 5, samples=200, values={"accuracy": number / 100, "loss": 0.5})


def ended(folder, **changes):
    summary = {"steps": 20, "digest": "0123456789abcdef" * 4, "evaluation": {"accuracy": 0.98}, "folder": str(folder)}
    return RunEnded(status="finished", summary={**summary, **changes})


def run(sink, folder, steps, resumed_step=0):
    """Steps with a loss each, an evaluation every five."""
    sink.notice(started(folder, resumed_step))
    for number in steps:
        sink.notice(step(number, loss=1 / number, learning_rate=0.1))
        if number % 5 == 0:
            sink.notice(evaluated(number))


def points(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, pytest.approx(event.value)) for event in accumulator.Scalars(tag)]
