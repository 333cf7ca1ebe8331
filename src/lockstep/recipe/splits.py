"""The data of a run: its opened train and test split, and the batches loaded from them."""

import datetime
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import torch

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec, Source, Tokenizer
from lockstep.base.errors import ConfigError, DataError, few
from lockstep.base.events import Warned
from lockstep.base.model_contracts import Batch
from lockstep.core.distributed.collectives import all_gather_object, raise_on_all_ranks
from lockstep.core.modules.module_trace import fingerprint
from lockstep.core.numerics.digest import digest
from lockstep.core.numerics.seeds import generators_restored
from lockstep.data.augment import augmented
from lockstep.data.bad_samples import Faults
from lockstep.data.chat import ChatTokenizer, Contents
from lockstep.data.data_config import LEARNED, OwnFilesSection, StreamSection
from lockstep.data.dataset import limited, measurable, open_source, packed, stream_of, with_tokens
from lockstep.data.exclusion import excluded_samples, summed
from lockstep.data.fingerprint import check_equal, contents_of, labels_of
from lockstep.data.loader import Loader, one_by_one
from lockstep.data.mixture import Joined, Mixture
from lockstep.data.order import Blocks, Order, StreamOrder
from lockstep.data.processors import Processor, processor_of
from lockstep.data.sampler import ShardRequest, TrainingRequests
from lockstep.data.stream import Stream
from lockstep.data.text_tokenizers import TextTokenizer, open_tokenizer
from lockstep.models.objectives._choice import TAGS, name_of, with_objective
from lockstep.recipe.recipe import Recipe

MISSING = {"", "none", "null", "nan", "na", "n/a", "<na>"}
"""Texts in tables that mean a missing value."""


def check_stream(stream: Stream, first_samples: Callable[[], Batch]) -> str:
    """Have each rank read the first samples twice -> their digest. Collective. Raises DataError where they differ."""
    found: list[str] = []
    with raise_on_all_ranks():
        for _ in range(2):
            stream.rewind()
            found.append(digest(first_samples()))
    ranks = all_gather_object(found)
    what = None
    if any(first != second for first, second in ranks):
        what = "gives other samples when it is read again"
    elif other := [rank for rank, (first, _) in enumerate(ranks) if first != ranks[0][0]]:
        what = f"gives other samples to rank {other[0]} than to rank 0"
    if what is not None:
        error = DataError(
            f"{stream.where} is a stream that {what}: __iter__ has to begin anew, and give every process all samples "
            "in the same order, which depends on nothing but set_epoch(); Lockstep itself divides them"
        )
        error.is_shared = True
        raise error
    return found[0]


CONTENTS, FULL = "data.contents", "data.contents_full"
"""Names in the numeric recipe of sums over the training samples, see data.fingerprint."""
EXCLUDED = "data.excluded"
"""Name in the numeric recipe of a sum over the samples that data.exclude leaves out."""
CLASSES = "data.classes"
"""Name in the numeric recipe of the list of classes, in the order in which the model numbers them."""
DATE = "data.date"
"""Name in the numeric recipe of the date that a chat template asks for."""
MOST_NAMES = 100
"""Number of classes that the numeric recipe lists; for more there is a sum."""
MOST_SHOWN = 10
"""Number of classes named in a message."""
CHECKED_SAMPLES = 32
"""Number of first samples of a stream that all ranks compare."""
MANY_SAMPLES = sys.maxsize


def _class_record(classes: Sequence[str]) -> list[str] | str:
    return [*classes] if len(classes) <= MOST_NAMES else fingerprint(classes)


def check_classes(spec: DataSpec, numeric: Mapping[str, Any]) -> None:
    """Raise DataError where the data has other classes now than in a checkpoint's numeric recipe."""
    now, then = spec.labels, numeric.get(CLASSES)
    if then is None or not now or _class_record(now) == then:
        return
    known = then if isinstance(then, list) else []
    why = "set the data back to what the model was trained on, or take an export that was made then, which keeps them"
    if sorted(map(str, known)) == sorted(now):
        why = (
            "the same in another order, in which the model's outputs would be misread: a source has to give them in an "
            "order of its own, as sorted() does, and not in that of a set or of a folder"
        )
    trained = f"were {few(known, MOST_SHOWN)}" if known else "were others"
    raise DataError(f"the classes of the data {trained} in training, and are {few(now, MOST_SHOWN)} now: {why}")


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Both splits of a recipe's data, tokenized and augmented."""

    recipe: Recipe
    train: Source
    test: Source
    tokenizer: Tokenizer | None
    processor: Processor | None
    faults: Mapping[str, Faults]
    """Handling of unreadable samples, by split."""
    mixture: Mixture | None = None
    """How training draws from several sources."""
    blocks: Blocks | None = None
    """How training takes the samples of a stream."""
    excluded: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Training samples that are left out, sorted (data.exclude)."""
    first_samples: dict[str, str] = field(default_factory=dict)
    """CONTENTS -> a sum over the first samples of a stream that has been checked."""

    @property
    def pad_id(self) -> int:
        """Token id that short rows are padded with."""
        return self.tokenizer.pad_id if self.tokenizer else 0

    def common_numeric(self, warn: Callable[[str], None]) -> dict[str, Any]:
        """Return `numeric`, once all ranks have found that they hold the same data. A collective. Raises DataError."""
        with raise_on_all_ranks():
            facts = self.numeric(warn)
        check_equal(facts)
        return facts

    def numeric(self, warn: Callable[[str], None]) -> dict[str, Any]:
        """Return facts of the samples that change the weights, for the numeric recipe. Fetches some of them."""
        facts: dict[str, Any] = {}
        if labels := self.train.spec.labels:
            facts = {CLASSES: _class_record(labels)}
        if isinstance(self.tokenizer, ChatTokenizer) and self.tokenizer.day is not None:
            facts[DATE] = str(self.tokenizer.day)
        if (found := summed(self.excluded, self.train)) is not None:
            facts[EXCLUDED] = found
        if self.blocks is not None:
            samples = None if self.blocks.is_endless else self.blocks.samples
            return facts | self.first_samples | {"data.samples": samples, "data.shuffle_block": self.blocks.size}
        window = {} if self.train.lengths is None else {"data.group_by_length": self.recipe.data.group_by_length}
        sizes = {} if self.mixture is None else {"data.samples_of_sources": list(self.mixture.sizes)}
        fetch = partial(one_by_one, pad_id=self.pad_id, workers=self.recipe.data.workers)
        with generators_restored():
            for name in (CONTENTS, FULL) if self.recipe.data.fingerprint == "full" else (CONTENTS,):
                if (found := contents_of(self.train, fetch, is_full=name == FULL, warn=warn)) is None:
                    break
                facts[name] = found
        return facts | {"data.samples": len(self.train)} | window | sizes

    def renumbered(self, rows: np.ndarray) -> "Splits":
        """Return the data with the numbers that excluded samples have among these rows of the training split."""
        excluded = np.flatnonzero(np.isin(rows, self.excluded))
        train = replace(self.faults["train"], excluded=frozenset(excluded.tolist()))
        return replace(self, excluded=excluded, faults={**self.faults, "train": train})

    def order(self) -> Order:
        """Return the order in which training visits the samples."""
        train = self.recipe.train
        sizes: dict[str, Any] = {"global_batch": train.global_batch, "micro_batch": train.micro_batch}
        if self.blocks is not None:
            return StreamOrder(seed=self.recipe.run.seed, samples=self.blocks.samples, blocks=self.blocks, **sizes)
        return Order(
            seed=self.recipe.run.seed,
            samples=len(self.train) if self.mixture is None else self.mixture.samples,
            mixed=None if self.mixture is None else self.mixture.rows,
            **sizes,
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

    def check_streams(self) -> None:
        """Raise DataError, on all ranks, where a stream gives them different samples. A collective."""
        first = ShardRequest(step=-1, shard=0, epoch=0, indices=tuple(range(CHECKED_SAMPLES)))
        cpu = torch.device("cpu")
        if stream := stream_of(self.train):
            batch = partial(self.training_loader, [first], cpu, workers=0)
            self.first_samples[CONTENTS] = check_stream(stream, lambda: next(iter(batch())).batch)
        if stream := stream_of(self.test):
            number = min(CHECKED_SAMPLES, len(self.test))
            check_stream(stream, lambda: next(self.test_batches([range(number)])))

    def first_test_batches(self, sizes: Iterable[int]) -> list[Batch]:
        """Load the first test samples in batches of these sizes, starting over where there are too few."""
        indices = cycle(range(len(self.test)))
        return list(self.test_batches([*islice(indices, size)] for size in sizes))


def open_splits(
    recipe: Recipe, *, publish: Callable[[object], None] = lambda _: None, is_checked: bool = False
) -> Splits:
    """Open both splits, and tokenize what is not yet; `is_checked` verifies tokens made before. Raises DataError."""
    publish = _once(publish)
    train, test = (open_source(recipe.data, split, publish=publish) for split in ("train", "test"))
    if train.spec.labels and test.spec.labels and train.spec.labels != test.spec.labels:
        raise DataError(
            f"the classes of the training split are {few(train.spec.labels)}, and those of the test split are "
            f"{few(test.spec.labels)}: give both the same, in the same order, also where no sample is of some"
        )
    data, mixture, tokenizer = recipe.data, None, None
    options: dict[str, Any] = {"publish": publish, "is_checked": is_checked}
    if isinstance(train, Joined):
        limits = {"weights": data.weights, "samples_per_epoch": data.samples_per_epoch}
        mixture = Mixture(seed=recipe.run.seed, sizes=train.sizes, **limits)
    blocks = _blocks(recipe, train)
    test = measurable(test, recipe.evaluate.limit)
    if recipe.model.TAKES_TOKENS and train.spec.modality == "text":
        plugin = plugins.implementation("models", recipe.model.kind)
        tokenizer = plugin.tokenizer(recipe.model, train.spec, special=data.special_tokens_in_text)
        train, test = (with_tokens(source, data, tokenizer, **options) for source in (train, test))
    if data.PACKS:
        tokenizer = _packing_tokenizer(data, train)
        train, test = (
            limited(packed(source, data, tokenizer, split=split, **options), data, split)
            for split, source in (("train", train), ("test", test))
        )
    names = {"train": f"the training split of data.kind={data.kind}", "test": "the test split"}
    excluded = excluded_samples(data.exclude, train)
    faults = {split: Faults(name=name, split=split, skips=data.skips) for split, name in names.items()}
    faults["train"].excluded = frozenset(excluded.tolist())
    return Splits(
        recipe=recipe,
        train=augmented(train, data, recipe.run.seed),
        test=test,
        tokenizer=tokenizer,
        processor=processor_of(data),
        faults=faults,
        mixture=mixture,
        blocks=blocks,
        excluded=excluded,
    )


def _once(publish: Callable[[object], None]) -> Callable[[object], None]:
    """Return a `publish` that drops repeated warnings, such as those of both splits about their common file."""
    seen = set[str]()

    def publish_once(event: object) -> None:
        if isinstance(event, Warned):
            if event.message in seen:
                return
            seen.add(event.message)
        publish(event)

    return publish_once


def _blocks(recipe: Recipe, train: Source) -> Blocks | None:
    """Return how training takes the samples of a stream. Raises ConfigError for settings that do not fit one."""
    data, stream = recipe.data, stream_of(train)
    asked = data.samples_per_epoch if isinstance(data, StreamSection) else None
    if stream is None:
        if asked is not None:
            raise ConfigError(
                "data.samples_per_epoch belongs to a stream, and the training split has random access: leave it out"
            )
        return None
    if data.skips or data.exclude:
        raise ConfigError(
            f"{'data.on_bad_sample=skip' if data.skips else 'data.exclude'} leaves samples out by their number, but "
            f"{stream.where} is a stream: leave them out where it is read, the same ones each time"
        )
    samples, steps = asked or min(stream.length or MANY_SAMPLES, data.limit or MANY_SAMPLES), recipe.train.steps
    is_endless = samples == MANY_SAMPLES
    if is_endless:
        if steps is None:
            raise ConfigError(
                f"{stream.where} is a stream without a length: set train.steps, or data.samples_per_epoch to the "
                "number of samples that count as an epoch"
            )
        samples = steps * recipe.train.global_batch
    stream.train(samples, seed=recipe.run.seed, held_samples=recipe.train.global_batch + 2 * data.shuffle_block)
    return Blocks(size=data.shuffle_block, samples=samples, is_endless=is_endless)


def _packing_tokenizer(section: Any, train: Source) -> TextTokenizer:
    """Open the tokenizer of data that is packed. Raises DataError, ConfigError."""
    if section.exclude and section.tokenizer == LEARNED:
        what = f"data.tokenizer={LEARNED} learns from all texts, also from those that data.exclude leaves out"
        raise ConfigError(f"{what}: set it to bytes, or name a tokenizer")
    options = {"vocabulary": section.vocabulary, "cache": section.cache, "add_bos": section.add_bos}
    options["special"] = section.special_tokens_in_text
    if not section.CHATS:
        return open_tokenizer(section.tokenizer, train, **options)
    tokenizer = open_tokenizer(section.tokenizer, Contents(train), **options)
    if tokenizer.template is not None and section.add_bos != "auto":
        raise DataError("data.add_bos is of plain texts, and the chat template writes its own BOS token: leave it out")
    return ChatTokenizer(tokenizer, day=section.date or datetime.date.today(), skips=section.skips)


def prepare_splits(recipe: Recipe, publish: Callable[[object], None]) -> Splits:
    """Download and tokenize what is missing, publishing progress, and verify what was there already."""
    splits = open_splits(recipe, publish=publish, is_checked=True)
    names, found = splits.train.spec.labels, labels_of(splits.train)
    is_class = found is not None and found.ndim == 1 and found.dtype.kind == "i"
    used = np.unique(cast(np.ndarray, found)).tolist() if is_class else range(len(names))
    if len(names) >= len(used) == 1 and recipe.data.limit is None:
        message = f"all training samples are of one class, {names[used[0]]!r}: a model learns nothing from them"
        if is_class and recipe.model.code is recipe.data.code is None:  # the user's own may learn something else
            raise DataError(f"{message}; name data with more classes{_suggest_subfolder(recipe.data, names[0])}")
        publish(Warned(message=message))
    for message in (*_odd_texts(splits, recipe.model), *_missing_classes(names)):
        publish(Warned(message=message))
    by_case: dict[str, str] = {}
    for name in names:
        if (other := by_case.setdefault(name.casefold(), name)) != name:
            publish(Warned(message=f"{other!r} and {name!r} are two classes, which differ only in case"))
    return splits


def _missing_classes(names: Sequence[str]) -> Iterator[str]:
    """Yield warnings of classes whose name means a missing value in tables."""
    for name in names:
        if name.strip().lower() in MISSING:
            yield f"{name!r} is a class, of samples with that text as their label: remove the rows if it means no label"


def _odd_texts(splits: Splits, model: Any) -> Iterator[str]:
    """Yield warnings of training texts without words, and of those that are cut."""
    lengths, tokenizer = splits.train.lengths, splits.tokenizer
    if lengths is None or not len(lengths) or not model.TAKES_TOKENS or splits.train.spec.modality != "text":
        return
    if name_of(with_objective(splits.train.spec, model.objective)) != TAGS and tokenizer is not None:
        empty = np.flatnonzero(lengths <= len(tokenizer([""])[0]))
        if len(empty):
            yield f"{len(empty):,} of {len(lengths):,} training texts are empty, the first is sample {empty[0]}"
    if (longest := getattr(model, "max_length", None)) and (cut := int((lengths >= longest).sum())):
        yield (
            f"{cut:,} of {len(lengths):,} training texts have {longest} tokens or more: what is beyond "
            f"model.max_length={longest} is cut off"
        )


def _suggest_subfolder(data: Any, name: str) -> str:
    """Suggest what to set where a folder of class folders lies in another one."""
    only = data.train / name if isinstance(data, OwnFilesSection) else None
    if only is None or not only.is_dir() or not any(each.is_dir() for each in only.iterdir()):
        return ""
    return f", such as those in the folders of {only}: data.train={only}"
