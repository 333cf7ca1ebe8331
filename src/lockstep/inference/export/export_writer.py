"""How a model leaves: written, read back by a fresh reader, compared on real samples, and only then put in place."""

import copy
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Model
from lockstep.inference.export import export_facts as telling
from lockstep.inference.export import model_card
from lockstep.inference.export.export_config import FORMATS, DType, ExportSection, check, file_of
from lockstep.inference.export.export_facts import FILE, ExportFacts
from lockstep.inference.export.export_reader import forward_of
from lockstep.inference.export.formats import _graph, _weights
from lockstep.inference.export.round_trip import compare, judge, same_weights

HINT = (
    "As {dtype}, forward() has to turn its inputs into its weights' dtype, as x.to(self.layer.weight.dtype) does, and\n"
    "  its numbers have to fit; export.dtype=fp32 takes any model."
)


EVALUATION = ("evaluation.json", "evaluation.html", "confusion.svg")
"""What `lockstep evaluate` leaves in an export's folder, and is no longer true of another."""


@dataclass(frozen=True, kw_only=True)
class ExportSamples:
    """Real ones, of the test split."""

    few: Sequence[Batch]
    """The first ones: a batch that a graph may be traced with, and others of other sizes."""
    all: Callable[[], Iterable[Batch]]
    """The whole split, in batches."""


def export(
    model: Model,
    target: Path,
    *,
    section: ExportSection,
    facts: ExportFacts,
    samples: ExportSamples,
    beside: Callable[[Path], None] = lambda _: None,
) -> ExportFacts:
    """Write a model into the folder `target`, which appears, or changes, only when what was read back gives the same
    outputs -> its facts. `beside` writes more files, such as a tokenizer's.

    The same means: to rounding, with the same weights bit for bit where the model itself is read back; for reduced
    weights, what is lost on the whole test split is in the facts. Raises ConfigError for a dtype that the format cannot
    hold, ModelError when the outputs differ or the target cannot be written.
    """
    check(section)
    target = Path(os.path.realpath(target))  # a link to a folder elsewhere stays one
    facts = facts.model_copy(
        update={
            "kind": section.kind,
            "dtype": section.dtype,
            "file": file_of(section),
            "inputs": tuple(_graph.inputs_of(samples.few[0])),
            "outputs": _graph.names_of(model, samples.few[0]),
        }
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target), _replacing(target) as (temporary, old):
            beside(temporary)
            return _written(model, temporary, facts=_calibrated(facts, old), samples=samples)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the export to {target}: {error}; name another folder with --to") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Two that write the same export at once could mix their files."""
    lock = target.with_name(f".{target.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                with suppress(OSError):  # Windows does not remove an open file
                    lock.unlink()
    except Timeout:
        raise ModelError(f"another process is just writing the export {target}") from None


@contextmanager
def _replacing(target: Path) -> Iterator[tuple[Path, ExportFacts | None]]:
    """A new folder that takes the target's place at the end, and the facts of the export that is there; on any error
    the target stays what it was."""
    temporary, old = (target.with_name(f".{target.name}.{end}") for end in ("tmp", "old"))
    _restore(target, old)  # an export may have been killed between the two renames below
    _check_place(target)
    facts = _facts(target)
    for left in (temporary, old):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary, facts
        for file in (path for path in temporary.rglob("*") if path.is_file()):
            shutil.copymode(temporary / FILE, file)  # safetensors lets nobody else read its files
            storage.sync(file)
        if facts is not None:
            _carry_over(target, temporary, {*facts.files, *EVALUATION})
        storage.sync(temporary)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        storage.sync(target.parent)
    finally:
        _restore(target, old)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def _restore(target: Path, old: Path) -> None:
    if (old / FILE).is_file() and not target.exists():
        old.rename(target)


def _check_place(target: Path) -> None:
    """Raise ModelError for a folder that is not to be replaced."""
    if target.exists() and any(target.iterdir()) and not (target / FILE).is_file():
        raise ModelError(f"{target} holds other files and will not be replaced; name another folder with --to")
    if Path.cwd().is_relative_to(target):
        raise ModelError(f"{target} is the folder that you are in, and would be replaced; name another with --to")


def _facts(target: Path) -> ExportFacts | None:
    """Those of the export that is there already; raises ModelError where nobody knows what belongs to it."""
    try:
        return telling.read(target) if (target / FILE).is_file() else None
    except ModelError as error:
        raise ModelError(
            f"{error}\n  Until then nothing tells what in {target} belongs to the export: name another folder with --to"
        ) from None


def _calibrated(facts: ExportFacts, old: ExportFacts | None) -> ExportFacts:
    """The temperature that was fitted for the very same export stays."""
    if old is None or facts.calibration or (old.digest, old.kind, old.dtype) != (facts.digest, facts.kind, facts.dtype):
        return facts
    return facts.model_copy(update={"calibration": old.calibration})


def _carry_over(target: Path, folder: Path, ours: Collection[str]) -> None:
    """Copy what others have put into the export's folder, such as .git."""
    known = {Path(name).parts[0] for name in ours} | {path.name for path in folder.iterdir()}
    for path in target.iterdir():
        if path.name in known:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, folder / path.name, symlinks=True, copy_function=_copy)
        else:
            _copy(path, folder / path.name, follow_symlinks=False)


def _copy(source: Path | str, to: Path | str, *, follow_symlinks: bool = True) -> None:
    """With its permissions, and to stay: the original is about to be removed."""
    shutil.copy2(source, to, follow_symlinks=follow_symlinks)
    if not Path(to).is_symlink():
        storage.sync(Path(to))


def _written(model: Model, folder: Path, *, facts: ExportFacts, samples: ExportSamples) -> ExportFacts:
    """Write all files but those that came before, and compare -> the facts, complete."""
    is_reduced = facts.dtype != "fp32"
    style = plugins.find(FORMATS, facts.kind)
    written = _reduced(model, facts.dtype)
    style.write(written, folder, batch=samples.few[0], facts=facts)
    try:
        again = forward_of(folder, facts)
        found = compare(model, again, samples.all() if is_reduced else samples.few)
    except ModelError as error:
        if is_reduced:
            raise ModelError(f"{error}\n  {HINT.format(dtype=facts.dtype)}") from error
        raise
    if not is_reduced:  # else what is lost is measured, written down and said
        judge(found)
    if facts.dtype in _weights.TORCH_DTYPES:
        found = found.model_copy(update={"same_weights": same_weights(written, again, is_reduced=is_reduced)})
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    facts = facts.model_copy(update={"agreement": found, "files": (*there, FILE, model_card.FILE)})
    telling.write(facts, folder)
    storage.write(folder / model_card.FILE, model_card.text(facts))
    return facts


def _reduced(model: Model, dtype: DType) -> Model:
    """The model with the weights that are to be written."""
    if dtype == "fp32" or dtype not in _weights.TORCH_DTYPES:  # a format quantises by itself
        return model.eval()
    try:
        return copy.deepcopy(model).to(_weights.TORCH_DTYPES[dtype]).eval()
    except (RuntimeError, TypeError) as error:  # something in a user's model that cannot be copied
        raise ModelError(f"the model cannot be copied ({error}): export it with export.dtype=fp32") from error
