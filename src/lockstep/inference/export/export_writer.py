"""Writes an export: into a temporary folder, read back, compared on real samples, and only then moved into place."""

import copy
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lockstep.base import plugins, storage
from lockstep.base.errors import LockstepError, ModelError
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export import export_facts, model_card, round_trip
from lockstep.inference.export.export_facts import FILE, ExportFacts
from lockstep.inference.export.export_reader import forward_of
from lockstep.inference.export.formats import _graph, _weights
from lockstep.models._adapter import base_digest, base_settings, merged
from lockstep.recipe.export_config import FORMATS, DType, ExportSection, check

DTYPE_HINT = (
    "As {dtype}, forward() has to turn its inputs into its weights' dtype, as x.to(self.layer.weight.dtype) does, and\n"
    "  its numbers have to fit; export.dtype=fp32 takes any model."
)
EVALUATION_FILES = ("evaluation.json", "evaluation.html", "confusion.svg")
"""Files of `lockstep evaluate` in the export's folder: outdated after another export."""


def export(
    model: Model,
    target: Path,
    *,
    section: ExportSection,
    facts: ExportFacts,
    first: Sequence[Batch],
    every: Callable[[], Iterable[Batch]],
    write_more: Callable[[Path], None] = lambda _: None,
) -> ExportFacts:
    """Write a model into the folder `target` -> its facts. `write_more` adds files, such as a tokenizer's.

    The folder appears, or changes, only if the export, read back, gives the same outputs up to rounding, and the same
    weights bit for bit unless it is a graph. It is compared on the `first` batches of the test split, of several sizes,
    with whose first a graph is traced; reduced weights on `every` batch, and the facts hold the differences. Raises
    ConfigError for a dtype that the format cannot hold, ModelError when the outputs differ or the target cannot be
    written.
    """
    check(section)
    target = Path(os.path.realpath(target))  # a link to a folder elsewhere stays one
    facts = facts.model_copy(
        update={
            "kind": section.kind,
            "dtype": section.dtype,
            "file": plugins.find(FORMATS, section.kind).FILE or section.file,
            "inputs": tuple(_graph.inputs_of(first[0], facts.learned.TARGETS)),
            "outputs": _graph.names_of(model, first[0]),
        }
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target), _replacing(target) as (temporary, previous):
            write_more(temporary)
            return _write(model, temporary, facts=_with_calibration(facts, previous), first=first, every=every)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the export to {target}: {error}; name another folder with --to") from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Raise ModelError if another process writes this export."""
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
    """Yield a temporary folder that replaces the target unless an error is raised, and the previous export's facts."""
    temporary, old = (target.with_name(f".{target.name}.{end}") for end in ("tmp", "old"))
    _restore(target, old)  # an export may have been killed between the two renames below
    facts = _previous_facts(target)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary, facts
        for file in (path for path in temporary.rglob("*") if path.is_file()):
            shutil.copymode(temporary / FILE, file)  # safetensors makes its files readable for the owner only
            storage.sync(file)
        if facts is not None:
            _copy_foreign_files(target, temporary, {*facts.files, *EVALUATION_FILES})
        storage.sync(temporary)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        storage.sync(target.parent)
    finally:
        _restore(target, old)
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _restore(target: Path, old: Path) -> None:
    if (old / FILE).is_file() and not target.exists():
        old.rename(target)


def _previous_facts(target: Path) -> ExportFacts | None:
    """Return the facts of the export that is replaced. Raises ModelError for a folder that must not be, or where they
    are unreadable, as then its files are unknown."""
    is_export = (target / FILE).is_file()
    if not is_export and target.exists() and any(target.iterdir()):
        raise ModelError(f"{target} holds other files and will not be replaced; name another folder with --to")
    if Path.cwd().is_relative_to(target):
        raise ModelError(f"{target} is the folder that you are in, and would be replaced; name another with --to")
    try:
        return export_facts.read(target) if is_export else None
    except ModelError as error:
        raise ModelError(
            f"{error}\n  Until then nothing tells what in {target} belongs to the export: name another folder with --to"
        ) from None


def _with_calibration(facts: ExportFacts, previous: ExportFacts | None) -> ExportFacts:
    """Keep the temperature that was fitted for the same export."""
    same = ("digest", "kind", "dtype")
    if facts.calibration or any(getattr(previous, name, None) != getattr(facts, name) for name in same):
        return facts
    return facts.model_copy(update={"calibration": previous and previous.calibration})


def _copy_foreign_files(target: Path, folder: Path, own: Collection[str]) -> None:
    """Copy what users have put into the export's folder, such as .git."""
    known = {Path(name).parts[0] for name in own} | {path.name for path in folder.iterdir()}
    for path in target.iterdir():
        if path.name in known:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, folder / path.name, symlinks=True, copy_function=_copy)
        else:
            _copy(path, folder / path.name, follow_symlinks=False)


def _copy(source: Path | str, to: Path | str, *, follow_symlinks: bool = True) -> None:
    """Copy with permissions, and sync: the original is about to be removed."""
    shutil.copy2(source, to, follow_symlinks=follow_symlinks)
    if not Path(to).is_symlink():
        storage.sync(Path(to))


def _write(
    model: Model, folder: Path, *, facts: ExportFacts, first: Sequence[Batch], every: Callable[[], Iterable[Batch]]
) -> ExportFacts:
    """Write weights, facts and card, and compare with the model as it was trained -> the complete facts."""
    is_reduced = facts.dtype != "fp32"
    if is_adapter := facts.kind == "adapter":
        base = str(facts.recipe["model"].get("name", ""))
        beside = {"base": base, "base_digest": base_digest(model), "base_settings": base_settings(model)}
        facts = facts.model_copy(update=beside)
    written = _reduce(model if is_adapter else merged(model), facts.dtype)
    plugins.find(FORMATS, facts.kind).write(written, folder, batch=first[0], facts=facts)
    try:
        again = _read_back(folder, facts)
        agreement = round_trip.compare(model, again, every() if is_reduced else first)
    except ModelError as error:
        hints = [DTYPE_HINT.format(dtype=facts.dtype)] if is_reduced else []
        hints += [round_trip.FRESH_HINT] if "file" in facts.model and not is_reduced else []
        raise ModelError("\n  ".join([str(error), *hints])) from error
    if not is_reduced:  # else the differences are only recorded and reported
        round_trip.judge(agreement)
    if facts.dtype in _weights.TORCH_DTYPES and not (is_adapter and is_reduced):  # whose base stays in fp32
        is_same = round_trip.same_weights(written, again, is_reduced=is_reduced)
        agreement = agreement.model_copy(update={"same_weights": is_same})
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    facts = facts.model_copy(update={"agreement": agreement, "files": (*files, FILE, model_card.FILE)})
    export_facts.write(facts, folder)
    if "file" in facts.model:
        round_trip.check_elsewhere(folder, again, first[0])
    storage.write(folder / model_card.FILE, model_card.text(facts))
    return facts


def _read_back(folder: Path, facts: ExportFacts) -> Forward:
    """Read what was just written. Raises ModelError."""
    try:
        return forward_of(folder, facts)
    except ModelError as error:
        cause = error.__cause__ or error
        reason = str(cause) if isinstance(cause, LockstepError) else f"{type(cause).__name__}: {cause}"
        raise ModelError(f"the export cannot be read back ({reason})") from error


def _reduce(model: Model, dtype: DType) -> Model:
    """Return a copy in fp16 or bf16, else the model itself: the format quantises to int8."""
    if dtype == "fp32" or dtype not in _weights.TORCH_DTYPES:
        return model.eval()
    try:
        return copy.deepcopy(model).to(_weights.TORCH_DTYPES[dtype]).eval()
    except (RuntimeError, TypeError) as error:  # of a user's model
        raise ModelError(f"the model cannot be copied ({error}): export it with export.dtype=fp32") from error
