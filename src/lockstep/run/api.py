"""The Python API: `lockstep.train`, `evaluate`, `export` and `load`, in a script or a notebook."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base import storage
from lockstep.base.errors import ConfigError
from lockstep.base.remote_path import RemotePath, parsed
from lockstep.checkpoint import layout
from lockstep.inference import trained_model
from lockstep.inference.evaluate import evaluate_model
from lockstep.inference.evaluate.evaluate_model import EvaluationResult
from lockstep.inference.export import space as space_files
from lockstep.inference.export import uploads
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.loaded_model import LoadedModel, load
from lockstep.inference.predictor import DTypeName
from lockstep.launch.launch_here import launch_here
from lockstep.observe.run_folder import SUMMARY, RunFolder
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.recipe.recipe import Recipe

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Run:
    """A run, by its folder; stands for the folder where a path is asked for."""

    folder: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json: "digest", "steps", "evaluation" and more."""
        return storage.read_json(self.folder / SUMMARY)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, e.g. for pandas.DataFrame(run.metrics); [] without that sink.

        Warns of damaged lines, which are left out.
        """
        run = RunFolder(self.folder)
        found = [line.model_dump(exclude_unset=True) for line in run.metric_lines()]
        for note in run.notes:
            warnings.warn(note, stacklevel=2)
        return found

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints that are kept, oldest first; load() takes any of them."""
        return layout.listed(self.folder / "checkpoints")[::-1]

    def load(self, *, device: str = "cpu", dtype: DTypeName | None = None, trust_code: bool = False) -> LoadedModel:
        """Call lockstep.load with this run."""
        return load(self, device=device, dtype=dtype, trust_code=trust_code)

    def evaluate(self, *overrides: str, split: str = "test", trust_code: bool = False) -> EvaluationResult:
        """Call lockstep.evaluate with this run, which has more options."""
        return evaluate(self, *overrides, split=split, trust_code=trust_code)

    def export(self, *overrides: str, to: PathLike | None = None, trust_code: bool = False) -> "Export":
        """Call lockstep.export with this run, which has more options."""
        return export(self, *overrides, to=to, trust_code=trust_code)


@dataclass(frozen=True, kw_only=True)
class Export:
    """An export, by its folder; stands for the folder where a path is asked for."""

    folder: Path
    facts: ExportFacts
    """Contents of lockstep.json: digest, labels, metrics, recipe, how well the outputs agree."""
    space: Path | None = None
    """The folder of the Hugging Face Space that the export is in."""
    url: str | None = None
    """URL of the upload."""

    def __fspath__(self) -> str:
        return str(self.folder)

    def load(self, *, device: str = "cpu", dtype: DTypeName | None = None, trust_code: bool = False) -> LoadedModel:
        """Call lockstep.load with this export."""
        return load(self, device=device, dtype=dtype, trust_code=trust_code)


def train(
    config: PathLike | Mapping[str, Any],
    *overrides: str,
    processes: int | None = None,
    resume: str = "auto",
    allow_drift: bool = False,
    trust_code: bool = False,
) -> Run:
    """Train on processes of this machine and wait for the end.

    `config` is a YAML file, a run's recipe.yaml, or the sections themselves: {"train": {"epochs": 3}}; `overrides`
    are of the form "train.epochs=3"; `processes` replaces launch.processes; `resume`, `allow_drift` and
    `trust_code` are those of `lockstep train`. Output of rank 0 goes to the current sys.stdout and sys.stderr (on
    Windows to the terminal); other ranks write to logs/rank-N.log.

    The processes do not import the calling script or notebook: it needs no `if __name__ == "__main__":`. Raises
    UserError for what the user can fix; Interrupted after a signal (Ctrl-C, a notebook's stop button), when the run can
    be resumed; for other failures of a process a LockstepError with the cause and its last output.
    """
    if processes is not None:
        overrides = (*overrides, f"launch.processes={processes}")
    if isinstance(config, Mapping):
        recipe, path = recipes.of_sections(config, overrides), Path("spawn")
    else:
        recipe, path = recipes.load(Path(config), overrides), Path(config)
    recipe = recipes.begun(recipe, path)
    trust = recipe_trust.authorize(recipe, path, trusts=trust_code)
    drift = ["--allow-drift"] if allow_drift else []
    launch_here(recipe, ("--resume", resume, *drift, *trust))
    return Run(recipe.folder)


spawn = train
"""Earlier name of `train`."""


def evaluate(
    target: PathLike,
    *overrides: str,
    split: str = "test",
    file: PathLike | None = None,
    worst: int = 20,
    calibrate: bool = False,
    to: PathLike | None = None,
    trust_code: bool = False,
) -> EvaluationResult:
    """Measure a run's best or newest checkpoint, a checkpoint or an export: every sample once.

    `split` is test or train; `file` is a table, or a folder of images or sounds, in place of a split; `worst` is the
    number of samples with the highest loss in the report; `calibrate` fits a temperature and stores it; `to` is the
    folder of the results, by default the run's or the export's. Progress and errors come as in `train`.
    """
    options = evaluate_model.EvaluateOptions(
        split=split, file=_path(file), worst=worst, calibrates=calibrate, to=_path(to), trusts=trust_code
    )
    _, folder = evaluate_model.measure(Path(target), overrides, options, launch=_launch_evaluation)
    return evaluate_model.read(folder)


def _launch_evaluation(recipe: Recipe, arguments: tuple[str, ...]) -> int:
    launch_here(recipe, arguments, name=evaluate_model.NAME)
    return 0


def export(
    run: PathLike,
    *overrides: str,
    to: PathLike | None = None,
    space: bool = False,
    push: str | None = None,
    private: bool = False,
    trust_code: bool = False,
) -> Export:
    """Write the model of a run or checkpoint for others to load, read it back, and compare.

    `overrides` are such as "export.kind=onnx"; `to` is the folder to write, by default export, or export-KIND, in the
    run's folder; with `space` it becomes the folder of a Hugging Face Space. If `to` is a URL, such as s3://bucket/mine,
    the default folder is written, and copied there. `push` uploads the folder as OWNER/NAME to the hub, in one commit,
    and needs a token (HF_TOKEN, or `hf auth login`); `private` is for a repository that is not there yet. Raises
    UserError.
    """
    trained_model.authorize(Path(run), overrides, trusts=trust_code)
    target = None if to is None else parsed(os.fspath(to))
    upload: Callable[[Path, ExportFacts], str] | None = None
    if isinstance(target, RemotePath):
        if push is not None:
            raise ConfigError("--push uploads to the hub, and --to names another store: give one of them")
        upload, target = uploads.to_store(target, is_space=space), None
    elif push is not None:
        upload = uploads.to_hub(push, is_space=space, is_private=private)
    write = trained_model.export_space if space else trained_model.export
    facts, folder = write(Path(run), overrides, target)
    url = upload(folder, facts) if upload is not None else None
    if space:
        return Export(folder=folder / space_files.MODEL, facts=facts, space=folder, url=url)
    return Export(folder=folder, facts=facts, url=url)


def _path(given: PathLike | None) -> Path | None:
    return None if given is None else Path(given)
