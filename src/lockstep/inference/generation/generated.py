"""A completion as it is answered: by a server, and in Python."""

from pydantic import BaseModel, Field

from lockstep.inference.generation.generator import Completion, Generator


class Generated(BaseModel):
    """A completion."""

    text: str
    finish: str = Field(description="end: the text is complete; stop: a stop text came; length: max_tokens.")
    tokens: int
    seed: int
    model: str = Field(description="Name and digest.")


def generated(generator: Generator, completion: Completion) -> Generated:
    """What is answered for a completion that has ended."""
    return Generated(
        text=completion.text,
        finish=completion.finish,
        tokens=len(completion.tokens),
        seed=completion.sampling.seed,
        model=generator.facts.title,
    )
