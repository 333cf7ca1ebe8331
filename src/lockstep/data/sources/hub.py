"""Settings of data sets of the Hugging Face hub."""

from typing import Self

from pydantic import model_validator

from lockstep.data.data_config import ImageSection, Origin, StreamSection, hub_origin


class Config(ImageSection, StreamSection):
    """A Hugging Face data set: one text or image column, and one label column."""

    STARTER = {"data": {"name": "fancyzhx/ag_news", "text_column": "text"}}

    incidental = StreamSection.incidental | {"streaming"}

    name: str
    """Name on the hub (fancyzhx/ag_news), or a local folder of CSV, JSON, Parquet or image files, or one that the
    library `datasets` has saved (save_to_disk)."""
    subset: str | None = None
    """Name of its configuration, where it has several."""
    revision: str | None = None
    """Branch, tag or commit of it; by default the newest. Only a commit keeps runs equal for ever."""
    train_split: str = "train"
    """The split to learn from; a slice such as train[10%:] is one too."""
    test_split: str = "test"
    """The split to test on; a slice such as train[:10%] is one too."""
    text_column: str | None = None
    """The column of texts; either this or image_column."""
    image_column: str | None = None
    """The column of images; either this or text_column."""
    label_column: str = "label"
    """The column of labels: class numbers with names, or any texts or numbers."""
    streaming: bool = False
    """Read the samples while training, as a stream, instead of downloading all of them first."""

    @model_validator(mode="after")
    def _one_modality(self) -> Self:
        if (self.text_column is None) == (self.image_column is None):
            raise ValueError("give exactly one of text_column and image_column: it says what a sample is")
        if self.labels == "tags" and self.text_column is None:
            raise ValueError("labels=tags are those of the words of a text: give text_column, not image_column")
        return self

    @property
    def modality(self) -> str:  # type: ignore[override]
        return "image" if self.text_column is None else "text"

    @property
    def sample_column(self) -> str:
        return self.text_column or self.image_column or ""

    def origin(self) -> Origin:
        return hub_origin(self.name, subset=self.subset, revision=self.revision, split=self.test_split)
