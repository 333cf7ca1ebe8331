"""What a process of a proof is asked to do, as a file that its launcher hands on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.run.recipe import Recipe

REFUSED = "refused.json"
"""What a process leaves behind whose run is not to be: {"reason"}."""
WHOLE_TEST = 32
"""A test split of at most so many micro-batches is evaluated whole."""
PART_OF_TEST = 8
"""Of a larger one, so many micro-batches and a ragged one."""


@dataclass(frozen=True, kw_only=True)
class ProofRequest:
    train_samples: int
    """Train on so many samples, spread evenly over the split: few enough that the steps cross the ends of epochs."""
    test_samples: int
    pause_after: int | None = None
    """The last rank halts inside the forward pass of the step after so many, and says so in `paused.json`."""
    is_traced: bool = False
    inspect: bool = False
    """Look into single micro-batches instead of training; the rows are written to `rows.json`."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> "ProofRequest":
        """The reverse of dump, from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def train_samples(recipe: Recipe, there: int) -> int:
    """Samples of an epoch in a proof: two whole steps and a ragged one in which some shards are short or empty.

    No micro-batch is left with a single sample, which BatchNorm refuses.
    """
    batch, size = recipe.train.global_batch, recipe.train.micro_batch
    ragged = min(batch // 2 + max(2, size // 2), batch - 1)
    return min(there, 2 * batch + ragged - (ragged % size == 1 and size > 1))


def test_samples(recipe: Recipe, there: int) -> int:
    """Samples of the test split that a proof evaluates; never a whole number of micro-batches, where it can choose."""
    size = recipe.evaluate.micro_batch or recipe.train.micro_batch
    return there if there <= WHOLE_TEST * size else PART_OF_TEST * size + max(1, size // 3)
