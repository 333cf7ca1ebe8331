"""The runs of a proof: real trainings, each in separate processes, in a temporary folder."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel

from lockstep.base import devices, plugins, storage
from lockstep.base.errors import LockstepError, UserError
from lockstep.base.world import cores
from lockstep.checkpoint.layout import listed, step_of
from lockstep.core.host.memory_meter import available_bytes
from lockstep.parallel.strategy_config import StrategySection
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.splits import Splits
from lockstep.tools import trials
from lockstep.tools.prove.proof_table import NotShown
from lockstep.tools.trials import TrialEnd, TrialFailed, processes_text, strategy, strategy_of

CONTEXT_BYTES = 600 << 20
"""GPU memory that a process takes beside its tensors, roughly: the CUDA context and the libraries' kernels."""
SPEEDS = ("samples_per_second", "tokens_per_second", "mfu")
"""Values of a step that differ from run to run."""
REFUSED = "refused.json"
"""File of a process that refuses its request: {"reason"}."""
WHOLE_TEST = 32
"""Number of micro-batches up to which a test split is evaluated whole."""
TEST_SUBSET = 8
"""Number of micro-batches of a larger one that are evaluated, besides a ragged one."""


class ProofRequest(BaseModel):
    train_samples: int
    """Size of the training subset, spread evenly over the split: small enough that the steps cross epoch ends."""
    test_samples: int
    pause_after: int | None = None
    """Number of steps after which the last rank halts in the forward pass of the next, and writes `paused.json`."""
    is_traced: bool = False
    inspect: bool = False
    """Whether to check single micro-batches instead of training; the rows are written to `rows.json`."""


def train_samples(recipe: Recipe, available: int) -> int:
    """Return the size of an epoch in a proof: two whole steps and a ragged one, where some shards are short or empty.
    No micro-batch is left with a single sample, which BatchNorm refuses."""
    batch, size = recipe.train.global_batch, recipe.train.micro_batch
    ragged = min(batch // 2 + max(2, size // 2), batch - 1)
    return min(available, 2 * batch + ragged - (ragged % size == 1 and size > 1))


def test_samples(recipe: Recipe, available: int) -> int:
    """Return the number of test samples that a proof evaluates; no whole micro-batches, where there is a choice."""
    size = recipe.evaluate.micro_batch or recipe.train.micro_batch
    return available if available <= WHOLE_TEST * size else TEST_SUBSET * size + max(1, size // 3)


def request_for(recipe: Recipe, data: Splits) -> ProofRequest:
    return ProofRequest(
        train_samples=train_samples(recipe, len(data.train)), test_samples=test_samples(recipe, len(data.test))
    )


@dataclass(frozen=True, kw_only=True)
class ProofRun(TrialEnd):
    folder: Path

    def read(self, name: str) -> Any:
        return storage.read_json(self.folder / name)

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
    repeat_cause: str = ""
    """Why single micro-batches differ when they are repeated, if they do. Runs then differ for the same reason."""

    def on(self, processes: int) -> ProofRun:
        """Return the undisturbed run with this many processes."""
        if processes not in self.undisturbed:
            self.undisturbed[processes] = self.run(f"world-{processes}", processes)
        return self.undisturbed[processes]

    def run(self, name: str, processes: int, *, parallel: StrategySection | None = None, **options: Any) -> ProofRun:
        """Run to the end, as `ended` does. Raises TrialFailed, NotShown where the strategy refuses this run."""
        run = self.ended(name, processes, parallel=parallel, **options)
        if parallel and run.code == UserError.exit_code and run.refusal:
            raise NotShown(f"{parallel.kind} refuses this run: {run.refusal}")
        if run.code:
            raise TrialFailed(run.output, run.code, f"the proof's run {name} on {processes_text(processes)}")
        return run

    def with_strategy(self, kind: str, processes: int) -> ProofRun:
        """Run to the end with another strategy. Raises TrialFailed, NotShown."""
        own, parallel = self.recipe.parallel, section(self.recipe, kind)
        default = "ddp" if own.MOST_PROCESSES == 1 else own.kind  # see ended
        if kind in (own.kind, default) and processes in self.undisturbed:
            return self.undisturbed[processes]
        return self.run(f"{kind}-{processes}", processes, parallel=parallel)

    def kill(self, name: str, processes: int, *, every: int) -> tuple[int, int]:
        """Run with a checkpoint every `every` steps, and kill the last rank in the middle of the second step after the
        first one, once that is written (asynchronously). Returns the killed process, and the newest checkpoint's steps.

        Raises TrialFailed, also when the run ends in any other way than by the kill.
        """
        note, checkpoints = self.folder / name / "paused.json", self.folder / name / "checkpoints"
        request = self.request.model_copy(update={"pause_after": every + 1})
        changes = {"checkpoint": {"every_steps": every}}
        killed: list[int] = []

        def poll() -> None:
            if not killed and note.is_file() and listed(checkpoints):
                killed.append(storage.read_json(note)["process"])
                with suppress(psutil.Error):
                    psutil.Process(killed[0]).kill()

        run = self.ended(name, processes, request=request, changes=changes, poll=poll)
        left = listed(checkpoints)
        if not killed or not run.code or not left:
            raise TrialFailed(run.output, run.code, f"the proof's run {name} on {processes_text(processes)}")
        return killed[0], step_of(left[0])

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

    def ended(
        self,
        name: str,
        processes: int,
        *,
        request: ProofRequest | None = None,
        parallel: StrategySection | None = None,
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> ProofRun:
        """Run to the end, whatever that is. It does few steps, without evaluations, saves and reports, with another
        strategy and other settings by section, if given. A run in an existing folder is resumed."""
        folder, request = self.folder / name, request or self.request
        folder.mkdir(parents=True, exist_ok=True)
        self.report(f"run {name} on {processes_text(processes)} ...")
        sections = trials.without_interruptions(self.recipe, folder, steps=self.steps)
        sections["observe"] = {"sinks": ("jsonl",), "log_every": 1, "file": None}
        sections["launch"] = {"share_gpus": 0 < devices.count_gpus() < processes}
        for section_name, values in (changes or {}).items():
            sections.setdefault(section_name, {}).update(values)
        parallel = parallel or self.recipe.parallel
        if request.inspect:
            parallel = strategy("single")
        elif request.is_traced or processes > (parallel.MOST_PROCESSES or processes):
            parallel = strategy("ddp", find_unused=True)  # a trace is of whole weights
        recipe = trials.varied(self.recipe, sections, parallel=parallel.fitted(processes))
        trial = trials.run(recipe, folder, task="prove", request=request, processes=processes, poll=poll)
        return ProofRun(folder=folder, **vars(trial))


def _shortage_of_gpus(processes: int, gpus: int, peak_bytes: int) -> str | None:
    """Return why so many processes cannot share the GPUs, with `peak_bytes` of tensors each; None if they can."""
    on_each = -(-processes // gpus)
    needed = on_each * (peak_bytes + CONTEXT_BYTES)
    if on_each == 1 or needed < torch.cuda.get_device_properties(0).total_memory:
        return None
    return f"{on_each} processes on one GPU would need about {needed / 2**30:.1f} GiB of its memory"


def config_of(kind: str) -> type[StrategySection]:
    config: type[StrategySection] = plugins.find("parallel.strategies", kind).Config
    return config


def processes_of(kind: str) -> int:
    return config_of(kind).MOST_PROCESSES or 2


def compared(recipe: Recipe) -> list[str]:
    """List the strategies that give the same bits, except the first run: the recipe's own on one process."""
    kinds = sorted(plugins.names("parallel.strategies"), key=processes_of)
    same = [kind for kind in kinds if config_of(kind).HAS_COMMON_BITS]
    return [kind for kind in same if kind != recipe.parallel.kind or processes_of(kind) > 1]


def section(recipe: Recipe, kind: str) -> StrategySection:
    """Return the recipe's settings of a strategy, else its defaults for any model. Raises NotShown where it cannot be
    used here, or where the recipe's strategy gives other weights than others do."""
    own = recipe.parallel
    try:
        parallel = strategy_of(recipe, kind, **config_of(kind).FOR_ANY_MODEL)
    except (ValueError, LockstepError) as error:  # such as a torch that is too old
        raise NotShown(str(error)) from None
    if own.breaks_reproducibility:
        raise NotShown(str(own.breaks_reproducibility))
    if settings := own.numeric(1):
        shown = ", ".join(f"parallel.{name}={value}" for name, value in settings.items())
        raise NotShown(f"{shown}: with it {own.kind} has weights of its own")
    return parallel
