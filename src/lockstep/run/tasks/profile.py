"""A run of `lockstep profile`: some steps measured by phase, one counted, some traced, on every rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lockstep.core.distributed.collectives import all_gather_object
from lockstep.core.host import phases, stream_clock
from lockstep.core.host.matmul_speed import faster_precision, peak_flops
from lockstep.core.host.memory_meter import device_peak_bytes
from lockstep.core.modules.dtensors import local_tensor
from lockstep.observe.profile.operators import most_expensive
from lockstep.observe.profile.step_trace import Steps, trace_file, traced
from lockstep.recipe.components import Components
from lockstep.run.tasks.scale import ScaleTask
from lockstep.tools import trials
from lockstep.tools.profile.profiling import ProfileRequest
from lockstep.training.loop_state import Training

NEEDS_GROUP = True


class ProfileTask(ScaleTask):
    """Measures the steps of a training, in turn by phase, by counting, and by tracing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request, self.folder = self.asked(ProfileRequest), self.request_file.parent
        self.found: dict[str, Any] = {"rank": self.world.rank}
        self.micro_batches = 0

    def run(self, resume: str, *, allow_drift: bool) -> None:
        """Train, and write down what was measured."""
        super().run(resume, allow_drift=allow_drift)
        trials.write_result(self.folder, self.world.rank, self.found)

    def starting(self, training: Training) -> None:
        precision, parameters = self.recipe.train.precision, sum(each.numel() for each in self.parts.model.parameters())
        self.found["memory"] = memory_by_kind(self.parts)
        all_gather_object(None)  # the peak is one that all ranks reach at the same time
        self.found["peak_flops"] = peak_flops(precision, self.device)
        self.found["faster_precision"] = faster_precision(precision, self.device, parameters=parameters)
        plain = training.steps
        training.steps = lambda start: self._measured(plain(start))

    def _measured(self, steps: Steps) -> Steps:
        """Yield the same steps, and measure them."""
        request = self.request
        stages = (
            (f"warming up: {count_of(request.warm_up)}", nullcontext(), request.warm_up),
            (f"measuring {count_of(request.steps)}", self._measure_phases(), request.steps),
            ("counting operations and memory", self._count_flops(), 1),
            ("", self._measure_activations(), 1),
            (f"tracing {count_of(request.traced)}", self._trace_operators(), request.traced),
        )
        for text, stage, count in stages:
            if text and self.world.is_main:
                trials.announce(self.folder, f"{text} ...")
            with stage:
                for _ in range(count):
                    micro_batches = next(steps, None)
                    if micro_batches is None:
                        return
                    self.micro_batches = sum(not each.ghost for each in micro_batches)
                    yield micro_batches
        yield from steps

    @contextmanager
    def _measure_phases(self) -> Iterator[None]:
        """Measure the seconds of a step by phase, and by the clock."""
        clock = phases.running()
        stream_clock.synchronize(self.parts.state.precision.device)
        start, before = time.perf_counter(), clock.so_far()
        yield
        stream_clock.synchronize(self.parts.state.precision.device)
        measured, steps = clock.so_far() - before, self.request.steps
        self.found |= {
            "step_seconds": (time.perf_counter() - start) / steps,
            "phases": {name: seconds / steps for name, seconds in measured.phases.items()},
            "hidden_seconds": max(0.0, measured.background - measured.phases["exchange"]) / steps,
            "delayed_seconds": measured.delayed / steps,
            "micro_batches": self.micro_batches,
            "peak_bytes": device_peak_bytes(),
        }

    @contextmanager
    def _count_flops(self) -> Iterator[None]:
        """Count the floating-point operations of a step, those of matrix products and the like."""
        counter = FlopCounterMode(display=False)
        with counter:
            yield
        self.found["flops"] = counter.get_total_flops()

    @contextmanager
    def _measure_activations(self) -> Iterator[None]:
        """Count bytes that a micro-batch keeps for its backward pass; storage kept more than once counts once."""
        module, kept = self.parts.model, dict[int, int]()
        known = {local_tensor(t).untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.found["memory"]["activations"] = sum(kept.values())

    @contextmanager
    def _trace_operators(self) -> Iterator[None]:
        with traced(trace_file(self.request.traces, self.world.rank), with_stack=True) as profiler:
            yield
        self.found["operators"] = most_expensive(profiler.events())


def count_of(steps: int) -> str:
    return f"{steps} step{'s' if steps > 1 else ''}"


def memory_by_kind(parts: Components) -> dict[str, int]:
    """Return the bytes of this rank's weights, gradients and optimizer state."""
    parameters = [local_tensor(parameter) for parameter in parts.state.module.parameters()]
    trained = [parameter for parameter in parts.state.module.parameters() if parameter.requires_grad]
    state = [value for values in parts.state.optimizer.state.values() for value in values.values()]
    return {
        "weights": sum(each.nbytes for each in parameters),
        "gradients": sum(local_tensor(each).nbytes for each in trained),
        "optimizer": sum(local_tensor(each).nbytes for each in state if isinstance(each, Tensor)),
    }


build = ProfileTask
