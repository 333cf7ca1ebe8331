"""The result of a completion, for the server and for Python."""

from pydantic import BaseModel, Field

from lockstep.inference.generation.generator import Completion, Generator


class Generated(BaseModel):
    """A completion."""

    text: str
    finish: str = Field(
        description="end: the text is complete; stop: a stop text came; length: max_tokens, or the context is full."
    )
    tokens: int
    prompt_tokens: int = Field(description="Those that the model has read of the prompt.")
    truncated: bool = Field(description="Whether the prompt was too long, and its beginning left out.")
    seed: int
    model: str = Field(description="Name and digest.")


def generated(generator: Generator, completion: Completion) -> Generated:
    """Return the result of a completion that has ended."""
    return Generated(
        text=completion.text,
        finish=completion.finish,
        tokens=len(completion.tokens),
        prompt_tokens=len(completion.prompt),
        truncated=completion.is_truncated,
        seed=completion.sampling.seed,
        model=generator.facts.title,
    )
