"""What a process of a proof is asked to do, as a file that its launcher passes on."""

from pydantic import BaseModel

from lockstep.run.recipe import Recipe

REFUSED = "refused.json"
"""Written by a process that cannot run what it is asked to: {"reason"}."""
WHOLE_TEST = 32
"""A test split of at most this many micro-batches is evaluated whole."""
TEST_SUBSET = 8
"""Of a larger one, this many micro-batches and a ragged one are evaluated."""


class ProofRequest(BaseModel):
    train_samples: int
    """Size of the training subset, spread evenly over the split: small enough that the steps cross epoch ends."""
    test_samples: int
    pause_after: int | None = None
    """After this many steps the last rank halts in the forward pass of the next, and writes `paused.json`."""
    is_traced: bool = False
    inspect: bool = False
    """Check single micro-batches instead of training; the rows are written to `rows.json`."""


def train_samples(recipe: Recipe, available: int) -> int:
    """Samples of an epoch in a proof: two whole steps and a ragged one in which some shards are short or empty.

    No micro-batch is left with a single sample, which BatchNorm refuses.
    """
    batch, size = recipe.train.global_batch, recipe.train.micro_batch
    ragged = min(batch // 2 + max(2, size // 2), batch - 1)
    return min(available, 2 * batch + ragged - (ragged % size == 1 and size > 1))


def test_samples(recipe: Recipe, available: int) -> int:
    """Samples of the test split that a proof evaluates; no whole number of micro-batches, where there is a choice."""
    size = recipe.evaluate.micro_batch or recipe.train.micro_batch
    return available if available <= WHOLE_TEST * size else TEST_SUBSET * size + max(1, size // 3)
