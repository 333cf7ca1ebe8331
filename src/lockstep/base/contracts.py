"""What data sources, tokenizers and launchers promise; a new one answers one of these. Imports nothing that takes time.

m = samples in a micro-batch, T = tokens of a text, C x H x W = channels, height, width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

Format = Literal["fp32", "bf16", "fp16"]
"""The number format that a run computes in; weights are fp32 in each of them."""

Columns = dict[str, Any]
"""A micro-batch before collation: column name -> array [m, ...], or a list of m rows: arrays, tensors, numbers."""


class Tokenizer(Protocol):
    """Turns texts into numbers; comes with the model, used by the data."""

    key: str
    """Changes whenever the same text could give other tokens; part of the token cache's name."""
    pad_id: int
    """The id that fills short rows."""

    def __call__(self, texts: list[str]) -> "list[np.ndarray]":
        """Token ids, one int32 array [T_i] per text."""

    def save(self, folder: Path) -> None:
        """Write what an export needs to make the same tokens."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a model must know of the data before it can be built."""

    modality: str
    """"image", "text", or a user's own word."""
    labels: tuple[str, ...] = ()
    """Names of the classes; a sample's label is a position in it. () where there are none, as in a regression."""
    image_shape: tuple[int, int, int] | None = None
    """(C, H, W) of every image."""
    pad: Mapping[str, float] = field(default_factory=dict)
    """Column name -> what its short rows are filled with; 0 for others, "input_ids" with the tokenizer's own."""
    masks: tuple[str, ...] = ()
    """Columns for which a "COLUMN_mask" is added, int64 [m, T]: 1 where a row is no filling."""


def samples_of(modality: str) -> str:
    """What samples of a modality are called in a sentence; one of a user's own is quoted."""
    return {"image": "images", "text": "texts"}.get(modality, f"samples of the kind {modality!r}")


HOOKS = {
    "models": {
        "tokenizer": "(config) -> Tokenizer; of models with TAKES_TOKENS",
        "metrics": "(config, spec) -> {name: torchmetrics Metric}; by default none besides a classifier's",
        "save": "(model, folder): the model in a format of its own; by default safetensors, with a loader beside it",
        "read_back": "(folder) -> Model: the reverse of save",
        "save_config": "(model, folder): the shape of a model, where its settings do not say all of it",
        "from_config": "(folder) -> Model: the reverse of save_config, with weights that mean nothing",
    },
}
"""What a plugin's module may have besides `build`: family -> function -> arguments and result. Everything else that may
be different is an attribute of its Config, with a default: see StrategySection, ModelSection, DataSection,
LaunchSection."""


@runtime_checkable
class Source(Protocol):
    """A split of a data set, indexed 0..len-1; a module `data/sources/NAME.py` has `Config`, `build(config, split)`."""

    spec: DataSpec
    lengths: "np.ndarray | None"
    """Length of each sample, int [len], where samples differ in length; None where all are alike."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """A whole micro-batch at once."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a launcher is asked to start."""

    recipe: Path
    """Where the config file of the run lies once it is started, in the run's folder."""
    text: str = ""
    """What is in it (YAML), for a launcher whose machines cannot read it there."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the worker."""

    @property
    def folder(self) -> Path:
        return self.recipe.parent


@dataclass(frozen=True)
class Plan:
    """What a launcher would do, in words that can be run by hand: shown by --dry-run."""

    argv: tuple[str, ...]
    """The command: of each process, or the one that hands the files in."""
    processes: int = 1
    """How often the command is run on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher sets."""
    files: dict[Path, str] = field(default_factory=dict)
    """Scripts and manifests that it would write and hand in: file -> text."""

    @property
    def module(self) -> tuple[str, ...]:
        """The module that each process runs, and its arguments: what follows Python's `-m`."""
        return self.argv[self.argv.index("-m") + 1 :]


class Launcher(Protocol):
    """Starts the processes of a run; a module `launch/NAME.py` has `Config` and `build(config, *, threads, shards)`."""

    def plan(self, request: Request) -> Plan:
        """What would be run; changes nothing. Raises LaunchError where it cannot be run as asked."""

    def run(self, plan: Plan, logs: Path) -> int:
        """Run it to its end, or hand it to a scheduler, and return the exit code."""

    def note(self) -> dict[str, Any]:
        """What identifies the job that this process is part of; kept in the run's job.json."""

    def status(self, note: Mapping[str, Any]) -> str:
        """The job that left this note: where it is, in which state, for how long; one line. Raises LaunchError."""

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Have that job save and end, and not start again; one line on what was done. Raises LaunchError."""

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        """The file in a run's folder of logs that holds what a terminal would have shown."""
