"""Turns a trained run into an export or a predictor."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.base import plugins, storage, trust
from lockstep.base.contracts import DataSpec, Tokenizer
from lockstep.base.errors import ConfigError, LaunchError, ModelError, absence
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.checkpoint import layout
from lockstep.checkpoint.weights import restore_model
from lockstep.core.host.remote_storage import here
from lockstep.core.numerics.digest import digest as digest_of
from lockstep.data.dataset import open_source
from lockstep.data.preparation import Preparation
from lockstep.data.processors import Processor, processor_of
from lockstep.data.text_tokenizers import TextTokenizer
from lockstep.inference.export import export_facts, export_reader, export_writer, space
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.generation.generator import Generator, generator
from lockstep.inference.predictor import DTypeName, Predictor, placed, predictor
from lockstep.models.objectives._choice import with_objective
from lockstep.recipe import build, recipe_trust
from lockstep.recipe.recipe import Recipe, in_use
from lockstep.recipe.run_paths import is_run, locate, run_of
from lockstep.recipe.splits import check_classes, open_splits

FIRST_BATCHES = (16, 1, 7)
"""Sizes of the batches that an export is compared on: several, as a graph may be specialized to the traced size."""
BATCH = 64
"""Batch size where the whole test split is compared."""
Opened = tuple[ExportFacts, Forward, Tokenizer | None, Processor | None]


def authorize(path: Path, overrides: Sequence[str] | None, *, trusts: bool) -> tuple[str, ...]:
    """Check the code of an export, run or checkpoint -> arguments that pass a yes on to workers. Raises UserError."""
    path = here(path)
    if export_reader.is_export(path):
        return trust.authorize(export_reader.code_of(path, export_facts.read(path)), trusts=trusts, folder=path)
    if not is_run(path):
        return ()
    recipe, root, _ = locate(path, overrides)
    return trust.authorize(recipe_trust.executable_code(recipe), trusts=trusts, folder=root.parent)


def export(path: Path, overrides: Sequence[str] | None, to: Path | None) -> tuple[ExportFacts, Path]:
    """Write the model of a run or checkpoint for others to load -> its facts, its folder. Raises UserError."""
    recipe, checkpoint = run_of(path, overrides)
    export_writer.check(recipe.export)
    data = open_splits(in_use(recipe))  # in use, a model reads one document
    preparation = {"prepare": data.processor.file.name} if isinstance(data.processor, Preparation) else {}
    model, facts = _model(recipe, checkpoint, data.train.spec, tokenizer=data.tokenizer, **preparation)

    def batches() -> Iterator[Batch]:
        rows = range(len(data.test))
        if data.test.lengths is not None:  # similar lengths together: less padding
            rows = data.test.lengths.argsort(kind="stable").tolist()
        chunks = (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))
        yield from data.test_batches(chunks)

    def write_more(folder: Path) -> None:
        """Write the tokenizer's files, the user's own code and the processor."""
        if isinstance(data.tokenizer, TextTokenizer):
            data.tokenizer.save(folder, longest=getattr(model, "longest", None) or facts.context)
        elif data.tokenizer is not None:
            data.tokenizer.save(folder)
        if recipe.model.code is not None:
            trust.copy_with_imports(recipe.model.code, folder)
        if data.processor is not None:
            data.processor.save(folder)

    target = (to or _not_a_link(recipe.folder / recipe.export.folder)).absolute()
    first = data.first_test_batches(FIRST_BATCHES)
    facts = export_writer.export(
        model, target, section=recipe.export, facts=facts, first=first, every=batches, write_more=write_more
    )
    return facts, target


def _not_a_link(target: Path) -> Path:
    """Return a default folder. Raises ModelError for a symbolic link, which may lead to files of another user."""
    if target.is_symlink():
        raise ModelError(f"{target} is a link, which is not followed: name the folder that it leads to with --to")
    return target


def export_space(path: Path, overrides: Sequence[str] | None, to: Path | None) -> tuple[ExportFacts, Path]:
    """Write an export into the folder of a Hugging Face Space -> its facts, that folder. Raises UserError."""
    target = (to or _not_a_link(run_of(path, overrides)[0].folder / space.FOLDER)).absolute()
    space.check(target)
    _not_a_link(target / space.MODEL)
    facts, _ = export(path, overrides, target / space.MODEL)
    space.write(target, facts)
    return facts, target


def open_predictor(
    path: Path, *, device: torch.device | None = None, dtype: DTypeName | None = None, base: str | None = None
) -> Predictor | Generator:
    """Open an export, a run or a checkpoint: a language model as a generator, others as a predictor. `base` is where
    the model of an exported adapter is now, a folder or a name on the hub. Raises UserError."""
    folder = resolve(path)
    opened = _read(folder, base) if export_reader.is_export(folder) else _built(*run_of(folder))
    facts, forward, tokenizer, processor = opened
    forward, device = placed(facts, forward, device=device, dtype=dtype)
    if facts.learned.GENERATES and isinstance(tokenizer, TextTokenizer):
        return generator(facts, forward, tokenizer, device=device)
    return predictor(facts, forward, tokenizer, processor=processor, device=device)


def _built(recipe: Recipe, checkpoint: Path) -> Opened:
    """Build the model of a checkpoint."""
    if recipe.data.PACKS:
        data = open_splits(in_use(recipe))
        model, facts = _model(recipe, checkpoint, data.train.spec, tokenizer=data.tokenizer)
        return facts, model, data.tokenizer, None
    model, facts = _model(recipe, checkpoint, open_source(recipe.data, "train").spec)
    takes_tokens = recipe.model.TAKES_TOKENS and facts.modality == "text"
    plugin = plugins.implementation("models", recipe.model.kind)
    options = {"special": recipe.data.special_tokens_in_text}
    tokenizer = plugin.tokenizer(recipe.model, facts.spec, **options) if takes_tokens else None
    return facts, model, tokenizer, processor_of(recipe.data)


def _read(folder: Path, base: str | None) -> Opened:
    """Read an export, again if another one replaced it meanwhile."""
    while True:
        before = _version(folder)
        try:
            facts = export_facts.read(folder, base)
            forward, tokenizer = export_reader.forward_of(folder, facts), export_reader.tokenizer_of(folder, facts)
            processor = export_reader.processor_of(folder, facts)
        except ModelError:
            if _version(folder) == before:
                raise
        else:
            if _version(folder) == before:
                return facts, forward, tokenizer, processor


def _version(folder: Path) -> bytes | None:
    """Return the bytes of the facts, which differ between exports; None while one replaces another."""
    try:
        return storage.read_regular(folder / export_facts.FILE, storage.MOST_JSON_BYTES)
    except OSError:
        return None


def resolve(path: Path) -> Path:
    """Return the folder of an export, or of a run's current checkpoint. Raises UserError."""
    path = here(path)
    if export_reader.is_export(path):
        return path.absolute()
    if not is_run(path):
        raise ConfigError(
            f"{path} is neither an export nor a run: "
            f"{absence(path, f'there is no {export_facts.FILE} and no recipe.yaml in it')} (such as runs/NAME)"
        )
    return run_of(path)[1]


def trained_on(folder: Path) -> tuple[str, str, str | None]:
    """Return what the model in a folder of `resolve` was trained with: the kind of the samples, the column of texts in
    tables, or "text", and the column of messages, of a model of chats. Raises UserError."""
    if export_reader.is_export(folder):
        facts = export_facts.read(folder)
        stored = facts.recipe.get("data", {})
        return facts.modality, str(stored.get("text_column") or "text"), stored.get("messages_column")
    data = run_of(folder)[0].data
    return str(data.modality), data.table_columns[0] or "text", getattr(data, "messages_column", None)


def loader(
    path: Path, *, device: str = "cpu", dtype: DTypeName | None = None, base: str | None = None
) -> Callable[[], Predictor | Generator]:
    """Return what opens a predictor; device `auto`: a GPU if there is one. Raises LaunchError for one not available."""
    try:
        opened = None if device == "auto" else torch.device(device)
        torch.empty(0, device=opened)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(f"device {device} cannot be used ({reason}); there is auto, cpu, and cuda on a GPU") from None
    return partial(open_predictor, path, device=opened, dtype=dtype, base=base)


def _end_tokens(recipe: Recipe, model: Model, tokenizer: Tokenizer | None) -> Sequence[int]:
    """Return the tokens that end a text; the settings of a model of transformers then name them, too."""
    if not isinstance(tokenizer, TextTokenizer):
        return ()
    special, settle = tokenizer.special(), plugins.hook("models", recipe.model.kind, "settle_tokens")
    if settle is None:
        return special.ends
    is_own = recipe.data.tokenizer == recipe.model.own("tokenizer")
    kept = np.flatnonzero(tokenizer.token_bytes == 0).tolist() if is_own else []
    return settle(model, ends=special.ends, bos=special.bos, pad=special.pad, kept=kept)


def _model(
    recipe: Recipe, checkpoint: Path, spec: DataSpec, *, tokenizer: Tokenizer | None = None, **more: Any
) -> tuple[Model, ExportFacts]:
    """Return the model of a checkpoint, and its facts."""
    manifest = layout.read_manifest(checkpoint)
    check_classes(spec, manifest.numeric)
    model, spec = build.build_model(recipe, spec), with_objective(spec, recipe.model.objective)
    restore_model(model, checkpoint)
    digest = digest_of(model.state_dict())
    return model.eval(), export_facts.facts_of(
        recipe.model,
        spec,
        name=recipe.folder.name,
        kind="checkpoint",
        step=manifest.step,
        digest=digest,
        calibration=export_facts.kept_calibration(recipe.folder, digest=digest),
        metrics=manifest.metrics,
        torch_version=str(manifest.numeric.get("torch_version", "")),
        recipe=recipe.model_dump(mode="json"),
        ends=_end_tokens(recipe, model, tokenizer),
        **_about(recipe),
        **more,
    )


def _about(recipe: Recipe) -> dict[str, Any]:
    """Return facts for the model card: from the settings, else from the source and the model."""
    origin = recipe.data.origin()
    return {
        "origin": origin,
        "license": recipe.export.license,
        "language": recipe.export.language or (origin.language if origin else ()),
        "base_model": recipe.export.base_model or recipe.model.base_model,
    }
