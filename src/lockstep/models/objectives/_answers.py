"""Predictions as they are answered, by a server and in Python: one class for each kind of objective."""

from pydantic import BaseModel, Field


class ClassAnswer(BaseModel):
    """A label."""

    label: str
    confidence: float = Field(description="The probability of the label.")
    probabilities: dict[str, float] = Field(description="The probability of every label.")


class ClassesAnswer(BaseModel):
    """All labels that fit."""

    labels: list[str] = Field(description="Those whose probability is more than a half.")
    probabilities: dict[str, float] = Field(description="The probability of every label by itself.")


class NumbersAnswer(BaseModel):
    """The predicted numbers."""

    values: dict[str, float] = Field(description="By their names.")


class TaggedWord(BaseModel):
    """A word and its label; null where the text is longer than what the model reads."""

    word: str
    label: str | None
    confidence: float | None = Field(description="The probability of the label.")


class WordsAnswer(BaseModel):
    """A label for each word."""

    tokens: list[TaggedWord] = Field(description="The words of the text, as white space separates them.")
