"""Interfaces of data sources, tokenizers and launchers. Imports nothing slow.

m = samples in a micro-batch, T = tokens of a text, C x H x W = channels, height, width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from lockstep.base.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Format = Literal["fp32", "tf32", "bf16", "fp16"]
"""The precision that a run computes in; weights are always fp32."""

Columns = dict[str, Any]
"""A micro-batch before collation: column name -> array [m, ...], or a list of m arrays, tensors or numbers."""


class Tokenizer(Protocol):
    """Turns texts into token ids; belongs to the model and is used by the data."""

    key: str
    """Changes whenever the same text could give other tokens; part of the token cache's file name."""
    pad_id: int
    """The token id that pads short rows."""

    def __call__(self, texts: list[str]) -> "list[np.ndarray]":
        """Tokenize; returns one int32 array [T_i] per text."""

    def save(self, folder: Path) -> None:
        """Write the files from which an export restores this tokenizer."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Description of the data that a model is built for."""

    modality: str
    """"image", "audio", "text", "tokens", or a name of the user's."""
    labels: tuple[str, ...] = ()
    """Class names; a sample's label is an index into them, a 0 or 1 for each (objective="multilabel"), or an index for
    each token, -100 for none (objective="token_classification"). () where there are no classes."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers that are predicted in a regression."""
    objective: str = "auto"
    """Kind of the task, as in model.objective; "auto" follows from labels, numbers and vocabulary."""
    image_shape: tuple[int, int, int] | None = None
    """(C, H, W) of every image."""
    prepared: bool = False
    """Whether a file's pixels, uint8 [C, H, W], have to pass `prepare` of the user's source first."""
    vocabulary: int | None = None
    """Number of different tokens; None where samples are not tokens to be predicted."""
    context: int | None = None
    """Tokens of every sample; None where they differ, or samples are not tokens to be predicted."""
    documents: bool = False
    """Whether the documents in a sample of tokens are kept apart: a column "document", int64 [m, T], numbers them, and
    a token attends only to those with its own number."""
    pad: Mapping[str, float] = field(default_factory=dict)
    """Column name -> padding value; by default 0, and the tokenizer's pad id for "input_ids"."""
    masks: tuple[str, ...] = ()
    """Columns for which a "COLUMN_mask" is added, int64 [m, T]: 1 except where a row is padded."""

    def __post_init__(self) -> None:
        """Check the names, and pad the labels of tokens with -100, which cross-entropy ignores. Raises DataError."""
        for what, names in (("labels", self.labels), ("numbers", self.numbers)):
            is_list = isinstance(names, tuple | list)
            if not is_list or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
                raise DataError(
                    f"DataSpec: {what}={names!r} is no tuple of different names: give one for each, in the order of "
                    'their indices, such as ("cat", "dog")'
                )
        if self.objective == "token_classification" and "label" not in self.pad:
            object.__setattr__(self, "pad", {**self.pad, "label": -100})


def samples_of(modality: str) -> str:
    """Return the plural noun for samples of a modality."""
    known = {"image": "images", "audio": "sounds", "text": "texts", "tokens": "texts cut into tokens"}
    return known.get(modality, f"samples of the kind {modality!r}")


HOOKS = {
    "models": {
        "tokenizer": "(config, spec, *, special) -> Tokenizer; of models with TAKES_TOKENS",
        "save": "(model, folder): the model in its own format; by default safetensors, with a loader beside it",
        "read_back": "(folder, spec) -> Model: the reverse of save",
        "save_config": "(model, folder): the model's architecture, where its settings do not determine it",
        "from_config": "(folder, spec) -> Model: the reverse of save_config, with arbitrary weights",
        "settle_tokens": "(model, *, ends, bos, pad, kept) -> token ids that end a text; names them in its settings",
    },
    "launch.launchers": {
        "on_nodes": "(config, threads, words) -> the words of a command that runs `lockstep WORDS` on each machine of "
        "a run at once, with its output here, and adds --rendezvous and --node-rank",
        "replace_node": "(folder, node_rank, rendezvous) -> what happens, for the user; with live recovery, another "
        "machine is to take the place of a lost one: it joins the run. Raises LaunchError",
    },
}
"""Optional functions of a plugin's module besides `build`: family -> name -> arguments and result. Other optional
features are attributes of its Config with defaults: see StrategySection, ModelSection, DataSection, LaunchSection."""


@runtime_checkable
class Source(Protocol):
    """A split of a data set, indexed 0..len-1; `data/sources/NAME.py` defines `Config` and `build(config, split)`."""

    spec: DataSpec
    lengths: "np.ndarray | None"
    """Length of each sample, int [len]; None where all have the same."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Fetch a whole micro-batch at once."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run to be launched."""

    recipe: Path
    """The config file, in the run folder once the run is started."""
    text: str = ""
    """Its contents (YAML), for launchers whose machines cannot read it there."""
    arguments: tuple[str, ...] = ()
    """Arguments of the workers."""

    @property
    def folder(self) -> Path:
        return self.recipe.parent


@dataclass(frozen=True)
class Plan:
    """Description of a launch, complete enough to run it by hand; shown by --dry-run."""

    argv: tuple[str, ...]
    """The command: that of each process, or the one that submits the files."""
    processes: int = 1
    """Number of times the command is run on this machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the launcher sets."""
    modules: tuple[str, ...] = ()
    """Modules that each process imports, as far as known."""
    state_copies: int | None = None
    """Number of copies of the training state that the processes hold at the start; None: one each."""
    process_multiple: int = 1
    """Divisor of any number of processes that the run may go on with; 0: no other number."""
    files: dict[Path, str] = field(default_factory=dict)
    """Scripts and manifests that it would write and submit: file -> text."""
    warnings: tuple[str, ...] = ()
    """Sentences on what would make the run fail or stop although it can be started."""


class Launcher(Protocol):
    """Starts the processes of a run.

    `launch/launchers/NAME.py` defines `Config`, `Note` and `build(config, *, threads, shards)`.
    """

    def plan(self, request: Request) -> Plan:
        """Describe what would be run, changing nothing. Raises LaunchError where it cannot be run as requested."""

    def run(self, plan: Plan, logs: Path) -> int:
        """Run a plan to its end, or submit it to a scheduler; return the exit code."""

    def note(self) -> dict[str, Any]:
        """Identify the job that this process belongs to; kept in the run's job.json."""

    def status(self, note: Mapping[str, Any]) -> str:
        """Describe in one line the state of the job that a note identifies. Raises LaunchError."""

    def is_over(self, note: Mapping[str, Any]) -> bool:
        """Return whether the job that a note identifies has ended, and will not start again. Raises LaunchError."""

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Have that job save and end without a restart; return one line on what was done. Raises LaunchError."""

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        """Return the log file that contains what a terminal would have shown; by default that of rank 0."""
        return logs / "rank-0.log"
