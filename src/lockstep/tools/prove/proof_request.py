"""The request to a process of a proof, as a file that its launcher passes on."""

from pydantic import BaseModel

from lockstep.recipe.recipe import Recipe

REFUSED = "refused.json"
"""File of a process that refuses its request: {"reason"}."""
WHOLE_TEST = 32
"""Number of micro-batches up to which a test split is evaluated whole."""
TEST_SUBSET = 8
"""Number of micro-batches of a larger one that are evaluated, besides a ragged one."""


class ProofRequest(BaseModel):
    train_samples: int
    """Size of the training subset, spread evenly over the split: small enough that the steps cross epoch ends."""
    test_samples: int
    pause_after: int | None = None
    """Number of steps after which the last rank halts in the forward pass of the next, and writes `paused.json`."""
    is_traced: bool = False
    inspect: bool = False
    """Whether to check single micro-batches instead of training; the rows are written to `rows.json`."""


def train_samples(recipe: Recipe, available: int) -> int:
    """Return the size of an epoch in a proof: two whole steps and a ragged one, where some shards are short or empty.

    No micro-batch is left with a single sample, which BatchNorm refuses.
    """
    batch, size = recipe.train.global_batch, recipe.train.micro_batch
    ragged = min(batch // 2 + max(2, size // 2), batch - 1)
    return min(available, 2 * batch + ragged - (ragged % size == 1 and size > 1))


def test_samples(recipe: Recipe, available: int) -> int:
    """Return the number of test samples that a proof evaluates; no whole micro-batches, where there is a choice."""
    size = recipe.evaluate.micro_batch or recipe.train.micro_batch
    return available if available <= WHOLE_TEST * size else TEST_SUBSET * size + max(1, size // 3)
