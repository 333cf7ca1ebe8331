"""Settings that all sources share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import platformdirs
from pydantic import BeforeValidator, Field, PositiveInt

from lockstep.base.config import MANY, LocalPath, PluginSection
from lockstep.base.remote_path import DataPath

AUTO, BYTES, LEARNED = "auto", "bytes", "bpe"
"""Values of data.tokenizer; others name a tokenizer of transformers."""
AddBos = Annotated[bool, Field(strict=True)] | Literal["auto"]
"""Values of data.add_bos."""
SpecialTokensInText = Literal["as_text", "as_tokens"]
"""Values of data.special_tokens_in_text."""
NO_PROCESSOR = "none"
"""Value of data.image_processor and data.feature_extractor; others name a model of transformers."""
OBJECTIVES = {
    "class": "classification",
    "classes": "multilabel",
    "number": "regression",
    "tags": "token_classification",
}
"""Objective of a label column, by data.labels."""
TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
"""Suffixes of files with one sample per row."""


def _with_options(values: Any) -> Any:
    """Convert [Flip, {Crop: {size: 4}}] -> [{Flip: {}}, {Crop: {size: 4}}]."""
    if not isinstance(values, list | tuple):
        return values
    named = [{each: {}} if isinstance(each, str) else each for each in values]
    if wrong := [each for each in named if not isinstance(each, dict) or len(each) != 1]:
        example = "{RandomCrop: {size: [28, 28]}}"
        raise ValueError(f"each is a name, or a name with options such as {example}, not {wrong[0]}")
    return [{name: given or {} for name, given in each.items()} for each in named]


def _as_list(values: Any) -> Any:
    return (values,) if isinstance(values, str | Path) else values


Transforms = Annotated[tuple[dict[str, dict[str, Any]], ...], BeforeValidator(_with_options)]
"""Names of classes, with or without options."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Origin of samples, for an export's model card; unknown fields are left out."""

    name: str
    """Common name of the data set."""
    hub: str | None = None
    """Its name on the Hugging Face hub, such as fancyzhx/ag_news."""
    subset: str | None = None
    revision: str | None = None
    split: str = "test"
    """Split of the metrics."""
    language: tuple[str, ...] = ()
    """ISO 639 codes."""


def hub_origin(name: str, *, subset: str | None, revision: str | None, split: str) -> Origin:
    """Return the origin of a data set of the hub, or of a local folder in its place."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Origin(name=folder.absolute().name, split=split)
    return Origin(name=name, hub=name, subset=subset, revision=revision, split=split)


class DataSection(PluginSection):
    """Training and test data."""

    STARTER: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings that `lockstep init` writes for it, by section."""
    TEMPLATE: ClassVar[Path | None] = None
    """Template of the Python file, for a source that is the user's own."""
    modality: ClassVar[str] = "any"
    """Kind of the samples, as far as the settings tell it: "image", "audio", "text", or "any"."""
    objective: ClassVar[str] = "auto"
    """Objective of the samples as far as the settings determine it, else "auto"."""
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"root", "workers", "cache", "augment", "group_by_length", "fingerprint", "exclude"}
    )

    limit: int | None = Field(None, ge=1, le=1000 * MANY)
    """Use only this many training samples, spread evenly over the file, for a quick try; the test split stays whole."""
    workers: int = Field(0, ge=0, le=1024)
    """Processes per rank that fetch data; 0 fetches in the training process. Any number gives the same weights."""
    group_by_length: int = Field(50, ge=1, le=MANY)
    """Training samples of different lengths, such as texts: those of this many steps are sorted by length and cut into
    steps, which are then visited in random order. Less padding, so more samples/s; 1 sorts within each step only."""
    augment: LocalPath | None = None
    """A Python file with `augment(sample)`: every training sample passes through it each time it is drawn, with random
    numbers that belong to the sample and the epoch."""
    transforms: Transforms = ()
    """Random changes of training images, after `augment`: a list of classes of kornia.augmentation with their
    arguments, such as [RandomHorizontalFlip, {RandomCrop: {size: [28, 28], padding: 4}}, {RandAugment: {n: 2, m: 9}}]
    (extra `augment`)."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Handling of a sample that cannot be read: stop ends the run; skip leaves it out of its micro-batch, the same on
    any number of processes. The run warns of each, and lists them in summary.json."""
    exclude: Annotated[tuple[LocalPath, ...], BeforeValidator(_as_list)] = ()
    """Files that name training samples to leave out, as on_bad_sample=skip does: all others keep their places. A number
    on each line; or CSV with the names of columns of the data's table, such as user, in its first line: rows with the
    same values are left out."""
    special_tokens_in_text: SpecialTokensInText = "as_text"
    """How names of special tokens, such as </s> or [SEP], are read in texts, messages and prompts: as_text, as plain
    text; as_tokens, as the tokens, so that a user's text can end itself or speak as another role. Those that a chat
    template writes are always tokens."""
    cache: LocalPath = platformdirs.user_cache_path("lockstep")
    """Cache folder, for tokens for example; may be deleted at any time."""

    fingerprint: Literal["sample", "full"] = "sample"
    """Training samples that a resume compares, to refuse data that has changed: sample, all that are in memory or
    tokenized and 64 of others, spread evenly, such as those of a file of your own; full, all: each is read at the
    start."""

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self.on_bad_sample == "skip"

    PACKS: ClassVar[bool] = False
    """Whether it is a PackedSection."""
    CHATS: ClassVar[bool] = False
    """Whether its texts are JSON of messages, of which the assistant's are learned."""

    @property
    def code(self) -> Path | None:
        """The user's Python file, if the source comes from one."""
        return None

    @property
    def table_columns(self) -> tuple[str, str]:
        """Names of the text column and the label column of a table, of which there may be settings."""
        return getattr(self, "text_column", None) or "text", getattr(self, "label_column", "label")

    def origin(self) -> Origin | None:
        """Return the origin of the samples; None if unknown."""
        return None


class PackedSection(DataSection):
    """Settings of texts that are joined, and cut into samples for language models."""

    modality = "tokens"
    objective = "causal_lm"
    PACKS = True

    tokenizer: str = AUTO
    """bytes: each byte is a token; bpe: parts of words, learned from the training texts; a tokenizer of transformers:
    its hub name, or a folder; auto: that of a model of transformers, else bytes."""
    add_bos: AddBos = "auto"
    """Beginning of a text, and of a prompt. auto: what the tokenizer puts before every text, such as the BOS token of
    Llama and Gemma; true: its BOS token, also where it puts none there; false: nothing. A chat template writes its
    own."""
    vocabulary: int = Field(2048, ge=300, le=2**20)
    """Number of tokens of bpe."""
    context: int = Field(256, ge=2, le=2**20)
    """T: tokens of a sample. The texts are joined, with an end token after each, and cut into samples."""
    documents: Literal["joined", "apart"] = "joined"
    """Attention in a sample of several texts, or chats: joined, a token attends to all before it; apart, only to those
    of its own text, whose positions begin at 0, and what follows the end of a text is not learned."""


class LabelledSection(DataSection):
    """Settings of sources with a column of labels."""

    labels: Literal["class", "classes", "number", "tags"] = "class"
    """Kind of the labels: one class for each sample; any number of classes, as a list or as a text with ";" between
    them; a number, for a regression; or tags, one class for each word of a text, as a list or with spaces between."""

    @property
    def objective(self) -> str:  # type: ignore[override]
        return OBJECTIVES[self.labels]


class StreamSection(DataSection):
    """Settings of sources that may be streams: data sets without random access."""

    incidental = DataSection.incidental | {"samples_per_epoch", "shuffle_block"}

    samples_per_epoch: int | None = Field(None, ge=1, le=1000 * MANY)
    """Samples of an epoch of a stream, after which the next one goes on; by default those of a pass, if its length is
    known. Not needed with train.steps."""
    shuffle_block: int = Field(1024, ge=1, le=MANY)
    """Samples in a row of a stream that are shuffled together; 1 keeps the order of the stream. A process holds about
    twice as many in memory."""


class PixelSection(DataSection):
    """Settings of sources that may give images."""

    image_processor: str = AUTO
    """Image processor that resizes images to what the model takes: auto, the one that was saved with a model of
    transformers, if the model is one; none, nothing but image_size."""


class ImageSection(PixelSection, LabelledSection):
    """Settings of sources with image files."""

    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Height and width every image is scaled to, where no image processor does so; by default all images must have the
    size of the first."""
    channels: Literal[1, 3] = 3
    """1 makes all images grey, 3 makes them red, green, blue; an image processor makes what its model takes."""


class AudioSection(DataSection):
    """Settings of sources that give sounds."""

    modality = "audio"

    feature_extractor: str = AUTO
    """Feature extractor that turns a sound into the inputs of the model: auto, the one that was saved with a model of
    transformers, if the model is one; none, nothing: the column input_values holds the sound at 16,000 Hz."""
    seconds: float = Field(10, gt=0, le=600)
    """Longer sounds are cut, also where the trained model is used."""


class OwnFilesSection(DataSection):
    """Settings of sources with the user's own files."""

    incidental = DataSection.incidental | {"train", "test"}

    train: DataPath
    """Training data: a folder with a folder for each class."""
    test: DataPath | None = None
    """Test data, in the same form; without it a part of `train` is held out."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """How much of `train` is held out when there is no `test`: always the same samples, whatever the seed."""

    def origin(self) -> Origin:
        return Origin(name=self.train.stem or self.train.name)
