"""The data of a run: its opened train and test split, and the batches loaded from them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from lockstep.base import plugins
from lockstep.base.contracts import Source, Tokenizer
from lockstep.base.events import Warned
from lockstep.base.model_contracts import Batch
from lockstep.data.augment import augmented
from lockstep.data.bad_samples import Faults
from lockstep.data.dataset import open_source, with_tokens
from lockstep.data.loader import Loader
from lockstep.data.order import Order
from lockstep.data.sampler import ShardRequest, TrainingRequests
from lockstep.run.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Both splits of a recipe's data, tokenized and augmented."""

    recipe: Recipe
    train: Source
    test: Source
    tokenizer: Tokenizer | None
    faults: Mapping[str, Faults]
    """Handling of unreadable samples, by split."""

    @property
    def pad_id(self) -> int:
        """The token id that short rows are padded with."""
        return self.tokenizer.pad_id if self.tokenizer else 0

    def numeric(self) -> dict[str, Any]:
        """What of the samples themselves changes the weights, for the numeric recipe."""
        window = {} if self.train.lengths is None else {"data.group_by_length": self.recipe.data.group_by_length}
        return {"data.samples": len(self.train)} | window

    def order(self) -> Order:
        """The order in which training visits the samples."""
        return Order(
            seed=self.recipe.run.seed,
            samples=len(self.train),
            global_batch=self.recipe.train.global_batch,
            micro_batch=self.recipe.train.micro_batch,
            lengths=self.train.lengths,
            window=self.recipe.data.group_by_length,
        )

    def training_loader(self, requests: Any, device: torch.device, *, workers: int | None = None) -> Loader:
        """Load the requested micro-batches of the train split; `workers` defaults to data.workers."""
        faults, workers = self.faults["train"], self.recipe.data.workers if workers is None else workers
        seed, pad_id = self.recipe.run.seed, self.pad_id
        return Loader(self.train, requests, faults=faults, seed=seed, pad_id=pad_id, workers=workers, device=device)

    def test_loader(self, requests: Iterable[ShardRequest], device: torch.device) -> Loader:
        """Load the requested micro-batches of the test split in this process."""
        faults, seed = self.faults["test"], self.recipe.run.seed
        return Loader(self.test, requests, faults=faults, seed=seed, pad_id=self.pad_id, workers=0, device=device)

    def first_training_batch(
        self, order: Order, device: torch.device, *, step: int = 0, workers: int | None = None
    ) -> Batch:
        """Load the first non-empty shard of a step. Raises SampleError."""
        requests = TrainingRequests(order=order, owned=lambda _, present: [min(present)], start=step, stop=step + 1)
        return next(iter(self.training_loader(requests, device, workers=workers))).batch

    def test_batches(self, indices: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Load test samples as batches on the CPU, one per list of indices. Raises SampleError, DataError."""
        requests = (ShardRequest(step=-1, shard=0, epoch=-1, indices=tuple(each)) for each in indices)
        for micro_batch in self.test_loader(requests, torch.device("cpu")):
            yield micro_batch.batch

    def first_test_batches(self, sizes: Iterable[int]) -> list[Batch]:
        """Load the first test samples in batches of these sizes, starting over where there are too few."""
        indices = cycle(range(len(self.test)))
        return list(self.test_batches([*islice(indices, size)] for size in sizes))


def open_splits(
    recipe: Recipe, *, publish: Callable[[object], None] = lambda _: None, is_checked: bool = False
) -> Splits:
    """Open both splits, and tokenize what is not tokenized yet. Raises DataError.

    `is_checked` verifies every byte of tokens made before.
    """
    train, test = (open_source(recipe.data, split) for split in ("train", "test"))
    tokenizer = None
    if recipe.model.TAKES_TOKENS and train.spec.modality == "text":
        tokenizer = plugins.implementation("models", recipe.model.kind).tokenizer(recipe.model)
        train, test = (
            with_tokens(source, recipe.data, tokenizer, publish=publish, is_checked=is_checked)
            for source in (train, test)
        )
    names = {"train": f"the training split of data.kind={recipe.data.kind}", "test": "the test split"}
    skips = recipe.data.skips
    return Splits(
        recipe=recipe,
        train=augmented(train, recipe.data, recipe.run.seed),
        test=test,
        tokenizer=tokenizer,
        faults={split: Faults(name=name, split=split, skips=skips) for split, name in names.items()},
    )


def prepare_splits(recipe: Recipe, publish: Callable[[object], None]) -> Splits:
    """Download and tokenize what is missing, publishing progress, and verify what was there already."""
    splits = open_splits(recipe, publish=publish, is_checked=True)
    labels = splits.train.spec.labels
    if len(labels) == 1:
        message = f"all training samples are of one class, {labels[0]!r}: a model learns nothing from them"
        publish(Warned(message=message))
    return splits
