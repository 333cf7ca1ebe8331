"""Shows that checkpoints are what the run's hash chain says, and what its config and its data give."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from torch import nn

from lockstep.base import devices, storage
from lockstep.base.errors import CheckpointError, ConfigError, few
from lockstep.base.world import cores
from lockstep.checkpoint import layout
from lockstep.checkpoint.layout import Link, Manifest
from lockstep.core.numerics.digest import digest
from lockstep.inference import trained_model
from lockstep.inference.export import export_facts, export_reader
from lockstep.observe.run_folder import SUMMARY, RunFolder
from lockstep.recipe import run_paths
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.replay.replaying import ReplayRequest, begin
from lockstep.tools.verify import signing
from lockstep.training import resume

VERIFIED, WRONG, INCOMPARABLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    segments: int
    seed: int
    from_start: bool
    sign: Path | None
    check: Path | None
    trusts: bool


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    recipe: Recipe
    chain: Sequence[Link]
    end: tuple[int, str | None]
    """The last step of a run that has ended, and the digest of its weights then."""
    kept: Mapping[int, Manifest]
    """Step -> manifest of an intact checkpoint, ascending."""
    damaged: Sequence[str]

    @property
    def unchained(self) -> list[int]:
        """Steps of kept checkpoints from before the chain: of an earlier version, or more than its length ago."""
        return [step for step in self.kept if step < min((link.step for link in self.chain), default=0)]

    def problems(self) -> Iterator[str]:
        """Yield what is not as it was written, by the files alone."""
        yield from self.damaged
        known = {link.step: link for link in self.chain}
        if not known:
            yield f"there is no hash chain in {SUMMARY}: the run was made by an earlier version"
        elif (self.chain[-1].step, self.chain[-1].digest) != self.end and self.chain[-1].step == self.end[0]:
            yield f"{SUMMARY} has another digest of the weights than the last checkpoint of its hash chain"
        if broken := layout.broken_link(self.chain):
            yield f"the hash chain is broken at step {broken.step}: its link does not follow from the one before"
        for step, manifest in self.kept.items():
            if step in self.unchained:
                continue
            own = [link for link in manifest.checkpoints if link.step >= min(known, default=0)]
            if known and (not own or any(known.get(link.step) != link for link in own)):
                yield f"step-{step:09} is not the checkpoint that was in its place: the hash chain names another"


def read(folder: Path) -> StoredRun:
    """Read a run's summary and every byte of its checkpoints. Raises ConfigError, CheckpointError."""
    recipe, root, _ = run_paths.locate(folder)
    damaged = {each: problem for each in layout.listed(root) if (problem := _problem(each))}
    whole = [layout.read_manifest(each) for each in reversed(layout.listed(root)) if each not in damaged]
    if not whole:
        raise CheckpointError(f"{folder} has no whole checkpoint: there is nothing to verify")
    chain, end = whole[-1].checkpoints, (whole[-1].step, whole[-1].digest)
    try:  # a run that goes on, or was killed, has none
        summary = storage.read_json(root.parent / SUMMARY)
        chain = TypeAdapter(tuple[Link, ...]).validate_python(summary.get("checkpoints", ()))
        end = summary["steps"], summary["digest"]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{root.parent / SUMMARY} cannot be used: {str(error).splitlines()[0]}") from None
    return StoredRun(
        recipe=recipe,
        chain=chain,
        end=end,
        kept={manifest.step: manifest for manifest in whole},
        damaged=[f"{each.name}: {problem}" for each, problem in damaged.items()],
    )


def _problem(folder: Path) -> str | None:
    problem = resume.problem(folder)
    return problem if problem or layout.is_linked(folder) else "its manifest has been changed since it was written"


def verify_run(path: Path, options: VerifyOptions, *, console: Console) -> int:
    """Verify a run, or an export in its folder, and print what is found -> exit code. Raises UserError, TrialFailed."""
    if options.sign:
        signing.read_key(options.sign, "private")  # before the run is read, which may take long
    is_export = export_reader.is_export(path)
    run = read(path.absolute().parent if is_export else path)
    folder = run.recipe.folder.absolute()
    problems, gaps = [*run.problems()], list[str]()
    if run.unchained:
        gaps.append(f"not in the hash chain, which began later: the checkpoints of steps {few(run.unchained)}")
    if is_export:
        wrong, unknown = _compared_export(path, run, trusts=options.trusts)
        problems, gaps = problems + wrong, gaps + unknown
    if options.check and (problem := signing.problem(folder, options.check, run.chain)):
        problems.append(problem)
    console.print(f"{len(run.kept)} checkpoints read to the last byte, {len(run.chain)} in the hash chain")
    for problem in problems:
        console.print(f"WRONG: {problem}", style="red", markup=False, soft_wrap=True)
    for gap in gaps:
        console.print(gap, style="yellow", markup=False, soft_wrap=True)
    code = WRONG if problems else _run_again(run, options, console)
    code = INCOMPARABLE if code == VERIFIED and is_export and gaps else code
    if code == VERIFIED and options.sign:
        signing.sign(folder, options.sign, run.chain)
        console.print(f"signed: {folder / signing.FILE}", soft_wrap=True)
    right = "verified" if options.segments else "verified only the files"
    console.print({VERIFIED: right, WRONG: "NOT VERIFIED", INCOMPARABLE: "verified only the files"}[code])
    return code


def _compared_export(path: Path, run: StoredRun, *, trusts: bool) -> tuple[list[str], list[str]]:
    """Compare an export with its checkpoint and its digest -> what is wrong, and what cannot be compared."""
    trained_model.authorize(path, None, trusts=trusts)
    facts = export_facts.read(path)
    wrong = []
    if facts.digest not in [link.digest for link in run.chain if link.step == facts.step]:
        wrong.append(f"the run has no checkpoint of step {facts.step} with the export's digest, {facts.digest[:16]}")
    forward = export_reader.forward_of(path, facts)
    if facts.dtype != "fp32" or not isinstance(forward, nn.Module) or run.recipe.model.adapter is not None:
        what = "merged with an adapter" if run.recipe.model.adapter is not None else f"a graph, or in {facts.dtype}"
        return wrong, [f"the export's weights are not compared, as they are {what}: verify one in fp32 safetensors"]
    if digest(forward.state_dict()) != facts.digest:
        wrong.append(f"the export's weights are not those of its digest, {facts.digest[:16]}")
    return wrong, []


def _run_again(run: StoredRun, options: VerifyOptions, console: Console) -> int:
    """Draw intervals and run them again, until one shows that something is wrong -> exit code."""
    if not options.segments:
        console.print("nothing is run again, and the data is not read (--segments 0)")
        return VERIFIED
    trained_model.authorize(run.recipe.folder, None, trusts=options.trusts)
    found = intervals(run, from_start=options.from_start)
    found = sorted(random.Random(options.seed).sample(found, min(options.segments, len(found))))
    steps, speed = sum(until - first for first, until in found), RunFolder(run.recipe.folder).summary()
    seconds = steps * run.recipe.train.global_batch / (speed.train_samples_per_second or 1e99)
    about = f", about {seconds:,.0f} s at its speed" if speed.train_samples_per_second else ""
    console.print(f"{steps:,} of {max(run.kept):,} steps are run again{about}", soft_wrap=True)
    report, code = trials.timed_lines(console), VERIFIED
    with trials.forking(run.recipe, "replay"):
        for first, until in found:
            if code == VERIFIED:
                code, what = _run_interval(run, first, until)
                report(f"steps {first + 1} to {until}: {what}")
    return code


def intervals(run: StoredRun, *, from_start: bool) -> list[tuple[int, int]]:
    """List the intervals between kept checkpoints that were run with the settings of today; also the one from the start
    where it is asked for, or there is no other. Raises ConfigError where there is none."""
    progress = run.kept[max(run.kept)].progress
    start = progress["parent"]["step"] if progress.get("parent") else 0
    changed = max((each["step"] for each in progress["drift"]), default=0)
    has_start = changed <= start and (from_start or len(run.kept) == 1)
    steps = [*[start] * has_start, *(s for s in run.kept if s >= changed)]
    if len(steps) < 2:
        raise ConfigError(
            f"no kept checkpoint follows another one since step {changed}, at which a resume changed settings "
            "(--allow-drift): verify the files only, with --segments 0"
        )
    return [*pairwise(steps)]


def _run_interval(run: StoredRun, first: int, until: int) -> tuple[int, str]:
    """Run an interval again, in a temporary folder -> exit code, and a sentence. Raises TrialFailed."""
    expected, recipe = run.kept[until], run.recipe
    has_own_bits = bool(recipe.parallel.numeric(expected.world_size))
    most = expected.world_size if has_own_bits else max(1, devices.count_gpus() or cores() // recipe.run.threads)
    processes = min(expected.world_size, most)
    own = layout.folder_of(recipe.folder.absolute() / "checkpoints", first)
    request = ReplayRequest(
        checkpoint=own if first in run.kept else recipe.run.parent,
        until=until,
        numeric=dict(expected.numeric),
        processes=processes,
        parallel=recipe.parallel.kind,
        opens=False,
        saves=True,
        verifies=True,
    )
    with trials.temporary_folder("lockstep-verify-") as outer:
        begin(folder := outer / "run", recipe.folder)
        trial = request.run(recipe, folder, lambda _: None)
        if differing := next(iter(trials.results(folder, list[tuple[str, Any, Any]])), []):
            is_machine = all("." not in name and name != "threads" for name, _, _ in differing)
            what = "; ".join(layout.described(*each) for each in differing)
            return (INCOMPARABLE, f"bits cannot be compared here ({what})") if is_machine else (WRONG, what)
        trial.checked()
        found = layout.read_manifest(layout.folder_of(folder / "checkpoints", until))
    same = (found.digest, found.progress["chain"]) == (expected.digest, expected.progress["chain"])
    what = f"the same weights, {found.digest[:16]}" if same else f"{found.digest[:16]}, not {expected.digest[:16]}"
    return (VERIFIED if same else WRONG), what
