"""`lockstep gate`: the first steps of a recipe, recorded in a golden file, and compared with one."""

import json
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.world import World
from lockstep.checkpoint.layout import differences
from lockstep.core.distributed import process_group
from lockstep.observe.run_folder import RunFolder
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.gate.gate_diff import difference, farthest
from lockstep.tools.gate.golden_file import Golden
from lockstep.tools.replay.replaying import ReplayRequest

NUMBERS = ("loss", "gradient_norm", "learning_rate")
TRACE = "trace-0.jsonl"
MOST_CHARACTERS = 100


def record(recipe: Recipe, path: Path, to: Path, *, overrides: list[str], steps: int, console: Console) -> None:
    """Train the first steps of a recipe, and write a golden file. Raises ConfigError, TrialFailed."""
    trials.check_writable("--record", to, suffix=".json")
    found = measured(recipe, steps=steps, console=console)
    here = Path.cwd()
    place = {"config": storage.seen_from(here, path), "folder": storage.seen_from(to.absolute().parent, here)}
    golden = found.model_copy(update={**place, "overrides": overrides}).sealed()
    storage.write(to, golden.model_dump_json(exclude_defaults=True))
    text = f"wrote {to}: {len(found.chain)} steps, digest {found.digest}; next: lockstep gate {to}"
    console.print(text, soft_wrap=True)


def check(golden: Golden, recipe: Recipe, *, within: int | None, console: Console) -> int:
    """Train the same steps again, and print the first difference -> 0 for the same bits, else 1.

    `within`: ULPs of float32 by which loss, gradient norm and learning rate of each step may differ. Raises ConfigError
    where, without it, processor or torch are others, and TrialFailed.
    """
    if within is None and (others := changes(golden.numeric, golden.numeric | machine())):
        why = "the golden file cannot be compared here, since bits depend on the processor and on torch:"
        advice = "Record it on such a machine, or compare numbers instead by --within ULPS, such as 65536"
        raise ConfigError("\n".join([why, *others, advice]))
    now = measured(recipe, steps=len(golden.chain), console=console)
    text, code = difference(golden, now), 1
    if text is None:
        text, code = f"same bits: {len(now.chain)} steps, digest {now.digest}", 0
    elif within is not None:
        distance, where = farthest(golden, now)
        code = int(distance > within)
        text += f"\n{'more than' if code else 'within'} {within} ULPs of float32: {distance:.1f} in {where}"
    console.print("\n".join([text, *changes(golden.numeric, now.numeric)]), soft_wrap=True)
    return code


def changes(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Describe the settings, facts and files that have changed; long values are cut."""
    lines = [f"  {name} has changed: {one!r} -> {other!r}" for name, one, other in differences(before, now)]
    return [line if len(line) < MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..." for line in lines]


def machine() -> dict[str, str]:
    """Return what other bits may come of, though code and settings are the same."""
    device = process_group.device_of(World())
    vectors = {"cpu_vectors": torch.backends.cpu.get_cpu_capability()} if device.type == "cpu" else {}
    return {"torch_version": str(torch.__version__), "device_model": process_group.device_model(device), **vectors}


def measured(recipe: Recipe, *, steps: int, console: Console) -> Golden:
    """Train the first steps of a recipe in a process of its own, in a temporary folder."""
    with trials.forking(recipe, "replay"), trials.temporary_folder("lockstep-gate-") as folder:
        trials.prepared(recipe)
        console.print(f"training {steps} steps ...")
        first_steps(steps).run(recipe, folder, lambda _: None).checked()
        return golden_of(folder)


def first_steps(steps: int) -> ReplayRequest:
    """Return the request for the beginning of a whole run, with its schedule, on one process."""
    return ReplayRequest(until=steps, opens=False, traced_from=1, is_golden=True)


def golden_of(folder: Path) -> Golden:
    """Read what a run has left in its folder."""
    run = RunFolder(folder)
    steps, summary = [line for line in run.metric_lines() if line.kind == "step"], run.summary()
    modules, *lines = [json.loads(line) for line in (folder / TRACE).read_text(encoding="utf-8").splitlines()]
    return Golden(
        kind="lockstep gate",
        version=1,
        lockstep=version("lockstep-train"),
        numeric=summary.numeric_recipe | machine(),
        digest=summary.digest,
        chain=[line.chain for line in steps],
        numbers=[*({name: line.values.get(name) for name in NUMBERS} for line in steps), {}],
        lines=lines,
        modules=modules["modules"],
    )
