"""The runs of a proof: real trainings, each in separate processes, in a temporary folder."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.base import devices
from lockstep.base.errors import UserError
from lockstep.base.world import cores
from lockstep.checkpoint.layout import listed, step_of
from lockstep.core.host.memory_meter import available_bytes
from lockstep.parallel.strategy_config import StrategySection
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.prove.proof_request import REFUSED, ProofRequest
from lockstep.tools.trials import TrialFailed, processes_text, strategy

CONTEXT_BYTES = 600 << 20
"""GPU memory that a process takes beside its tensors, roughly: the CUDA context and the libraries' kernels."""
SPEEDS = ("samples_per_second", "tokens_per_second", "mfu")
"""Values of a step that differ from run to run."""


@dataclass(frozen=True, kw_only=True)
class ProofRun:
    folder: Path
    output: str
    """Output of its launcher and rank 0."""
    peak_bytes: int
    """Peak memory of all its processes together."""

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @property
    def summary(self) -> dict[str, Any]:
        return self.read("summary.json")

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    @property
    def finding(self) -> str | None:
        """First finding of the checks of the user's code that may change weights, if any."""
        return next((each["what"] for each in self.summary["findings"] or () if each["leaves_promise"]), None)

    @property
    def refusal(self) -> str | None:
        """Why it could not run, in one line: a mistake of the user's, or a strategy that does not take the model."""
        return " ".join(self.read(REFUSED)["reason"].split()) if (self.folder / REFUSED).is_file() else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without timings."""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in SPEEDS} for line in lines]


@dataclass(frozen=True, kw_only=True)
class KilledRun:
    """A run whose last rank was killed in the middle of a step."""

    process: int
    steps: int
    """Steps done before the kill."""
    checkpoint: int
    """Steps of the newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunVariant:
    name: str
    """Name of its folder; a run in an existing one is resumed."""
    processes: int
    request: ProofRequest
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings by section and name that differ from the proof's other runs."""
    parallel: StrategySection | None = None
    """Strategy, if not the recipe's."""

    def __str__(self) -> str:
        return f"run {self.name} on {processes_text(self.processes)}"

    def recipe(self, recipe: Recipe, folder: Path, *, steps: int) -> Recipe:
        """Return the user's recipe with few steps, and without evaluations, saves and reports while it runs."""
        sections = trials.without_interruptions(recipe, folder, steps=steps)
        sections["observe"] = {"sinks": ("jsonl",), "log_every": 1, "file": None}
        for name, values in self.changes.items():
            sections.setdefault(name, {}).update(values)
        parallel = self.parallel or recipe.parallel
        if self.request.inspect:
            parallel = strategy("single")
        elif self.request.is_traced or self.processes > (parallel.MOST_PROCESSES or self.processes):
            parallel = strategy("ddp", find_unused=True)  # a trace is of whole weights
        return trials.varied(recipe, sections, parallel=parallel.fitted(self.processes))


@dataclass(kw_only=True)
class ProofRuns:
    """Starts runs of one recipe on a subset of its data, and ends all of them."""

    recipe: Recipe
    folder: Path
    steps: int
    request: ProofRequest
    report: Callable[[str], None]
    undisturbed: dict[int, ProofRun] = field(default_factory=dict)
    """Number of processes -> the run with the recipe's own strategy; each is made once."""

    def on(self, processes: int) -> ProofRun:
        """Return the undisturbed run with this many processes."""
        if processes not in self.undisturbed:
            self.undisturbed[processes] = self.run(f"world-{processes}", processes)
        return self.undisturbed[processes]

    def run(self, name: str, processes: int, request: ProofRequest | None = None, **changes: Any) -> ProofRun:
        """Run to the end; `changes` are settings by section. Raises TrialFailed."""
        variant = RunVariant(name=name, processes=processes, request=request or self.request, changes=changes)
        code, run = self.ended(variant)
        if code:
            raise self._failure(variant, run, code)
        return run

    def with_strategy(self, kind: str, processes: int, parallel: StrategySection) -> ProofRun | str:
        """Run to the end with another strategy -> the run, or why the strategy refuses it. Raises TrialFailed."""
        default = "ddp" if self.recipe.parallel.MOST_PROCESSES == 1 else self.recipe.parallel.kind  # see RunVariant
        if kind in (self.recipe.parallel.kind, default) and processes in self.undisturbed:
            return self.undisturbed[processes]
        name = f"{kind}-{processes}"
        variant = RunVariant(name=name, processes=processes, request=self.request, parallel=parallel)
        code, run = self.ended(variant)
        if code == UserError.exit_code and run.refusal:
            return run.refusal
        if code:
            raise self._failure(variant, run, code)
        return run

    def kill(self, name: str, processes: int, *, every: int) -> KilledRun:
        """Run with a checkpoint every `every` steps, and kill the last rank in the middle of a step, two after the
        first checkpoint, once that one is written (asynchronously).

        Raises TrialFailed, also when the run ends in any other way than by the kill.
        """
        note, checkpoints = self.folder / name / "paused.json", self.folder / name / "checkpoints"
        request = self.request.model_copy(update={"pause_after": every + 1})
        changes = {"checkpoint": {"every_steps": every}}
        variant = RunVariant(name=name, processes=processes, request=request, changes=changes)
        killed: list[int] = []

        def poll() -> None:
            if not killed and note.is_file() and listed(checkpoints):
                killed.append(json.loads(note.read_text(encoding="utf-8"))["process"])
                with suppress(psutil.Error):
                    psutil.Process(killed[0]).kill()

        code, run = self.ended(variant, poll)
        left = listed(checkpoints)
        if not killed or not code or not left:
            raise self._failure(variant, run, code)
        return KilledRun(process=killed[0], steps=every + 1, checkpoint=step_of(left[0]))

    def shortage(self, processes: int) -> str | None:
        """Return why this many processes cannot be run, if so: too few shards, GPUs, cores, or too little memory."""
        shards, threads = self.recipe.train.shards, self.recipe.run.threads
        needed, gpus = processes * self.on(1).peak_bytes, devices.count_gpus()
        if processes > 2 and shards < processes:
            return f"a step has {shards} micro-batches only"
        if gpus:
            return _shortage_of_gpus(processes, gpus, int(self.on(1).summary["peak_memory_bytes"]))
        if processes > 2 and processes * threads > 2 * cores():
            return f"{cores()} cores would be shared by {processes} processes of {threads} threads"
        return f"it needs about {needed / 2**30:.1f} GiB of memory" if needed > available_bytes() else None

    def ended(self, variant: RunVariant, poll: Callable[[], None] = lambda: None) -> tuple[int, ProofRun]:
        """Start a run and wait for its end -> exit code, run."""
        folder = self.folder / variant.name
        folder.mkdir(parents=True, exist_ok=True)
        self.report(f"{variant} ...")
        trial = trials.run(
            sharing_gpus(variant.recipe(self.recipe, folder, steps=self.steps), variant.processes),
            folder,
            task="prove",
            request=variant.request,
            processes=variant.processes,
            poll=poll,
        )
        return trial.code, ProofRun(folder=folder, output=trial.output, peak_bytes=trial.peak_bytes)

    def _failure(self, variant: RunVariant, run: ProofRun, code: int) -> TrialFailed:
        return TrialFailed(run.output, code, f"the proof's {variant}")


def sharing_gpus(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe with GPUs that the processes share, where there are fewer."""
    shares = 0 < devices.count_gpus() < processes
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"share_gpus": shares})})


def _shortage_of_gpus(processes: int, gpus: int, peak_bytes: int) -> str | None:
    """Return why so many processes cannot share the GPUs, with `peak_bytes` of tensors each; None if they can."""
    on_each = -(-processes // gpus)
    needed = on_each * (peak_bytes + CONTEXT_BYTES)
    if on_each == 1 or needed < torch.cuda.get_device_properties(0).total_memory:
        return None
    return f"{on_each} processes on one GPU would need about {needed / 2**30:.1f} GiB of its memory"
