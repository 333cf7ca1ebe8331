"""Tokenize texts once: into a memory-mapped file, keyed by texts and tokenizer, written by one process."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from filelock import FileLock

from lockstep.base import storage
from lockstep.base.contracts import Columns, Source, Tokenizer
from lockstep.base.errors import DataError
from lockstep.core.numerics.word_tokens import ids_of, spread

CHUNK = 1024
"""Texts per chunk; a killed build loses at most one."""


class TextFault(DataError):
    """A tokenizer refuses one of a list of texts, the one at `index`."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


Progress = Callable[[int, int], None]
"""Called with (texts done, total texts)."""


class Tokens:
    """A text source with "input_ids", a list of int32 arrays [T_i] from the cache, in place of the column "text"; of
    words with a "label" for each token."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.source, self.folder, self.spec = source, folder, source.spec
        self.offsets = np.load(folder / "offsets.npy")
        self.lengths = np.diff(self.offsets)
        self.ids = np.load(folder / "ids.npy", mmap_mode="r") if self.offsets[-1] else np.empty(0, np.int32)

    @property
    def sums(self) -> Any:
        """File name -> size and sha256, of all tokens."""
        return storage.read_json(self.folder / "manifest.json")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the source's columns for these samples, with tokens in place of texts."""
        columns = dict(self.source.__getitems__(indices))
        del columns["text"]
        ids = [np.asarray(self.ids[self.offsets[i] : self.offsets[i + 1]]) for i in indices]
        return _with_ids(columns, ids, indices, objective=self.spec.objective)


class TokenizedStream:
    """A text stream with "input_ids", tokenized when they are asked for, in place of the column "text"."""

    lengths: np.ndarray | None = None

    def __init__(self, source: Source, tokenizer: Tokenizer) -> None:
        self.source, self.tokenizer, self.spec = source, tokenizer, source.spec

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: Sequence[int]) -> Columns:
        """Return the source's columns for these samples, with tokens in place of texts."""
        columns = dict(self.source.__getitems__(indices))
        ids = self.tokenizer([_without_surrogates(text) for text in columns.pop("text")])
        return _with_ids(columns, ids, indices, objective=self.spec.objective)


def _with_ids(columns: Columns, ids: list[np.ndarray], indices: Sequence[int], *, objective: str) -> Columns:
    """Return the columns with tokens; of words, with a "label" for each token."""
    if objective == "token_classification":
        columns["label"] = [_spread(*each) for each in zip(columns["label"], ids, indices, strict=True)]
        ids = [ids_of(tokens) for tokens in ids]
    return {"input_ids": ids, **columns}


def tokenized(
    source: Source, tokenizer: Tokenizer, cache: Path, *, progress: Progress = lambda *_: None, is_checked: bool = False
) -> Tokens:
    """Open the tokens of a text source; tokenize first if the cache entry is missing or damaged. `is_checked` compares
    checksums instead of file sizes only.

    Safe to call from many processes at once: one builds, the others wait for it. A killed build resumes after the last
    complete chunk. Raises DataError when the cache folder cannot be written.
    """
    key = hashlib.sha256(f"{fingerprint(source)} {tokenizer.key}".encode()).hexdigest()[:24]
    folder = cache / "tokens" / key

    def is_usable() -> bool:
        return _is_complete(folder) and not (is_checked and verify(folder))

    if not is_usable():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_suffix(".lock")):
                if not is_usable():  # another process may have built it meanwhile
                    _build(source, tokenizer, folder, progress=progress)
        except OSError as error:
            raise DataError(
                f"cannot keep tokens in {cache}: {error.strerror or error}; name another folder with data.cache"
            ) from error
    return Tokens(source, folder)


def _spread(classes: Any, tokens: np.ndarray, index: int) -> np.ndarray:
    try:
        return spread(np.asarray(classes), tokens)
    except ValueError as error:
        raise DataError(f"the label of sample {index} does not fit its text: {error}") from None


def chunks(source: Source) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of the first text, texts) of each chunk."""
    for start in range(0, len(source), CHUNK):
        rows = range(start, min(start + CHUNK, len(source)))
        yield start, source.__getitems__(rows)["text"]


def place_of(source: Source, index: int) -> str:
    """Return where a text stands, such as "line 3 of chats.jsonl", if the source knows."""
    place = getattr(source, "place", None)
    return place(index) if place else f"text {index}"


def fingerprint(source: Source) -> str:
    """Return a hash that changes with any of the texts: the source's own, if it has one that takes less time."""
    if (own := getattr(source, "fingerprint", None)) is not None:
        return own
    digest = hashlib.sha256()
    for _, texts in chunks(source):
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def _is_complete(folder: Path) -> bool:
    try:
        sizes = storage.read_json(folder / "manifest.json")
        offsets, count = np.load(folder / "offsets.npy"), np.load(folder / "ids.npy", mmap_mode="r").size
        is_whole = offsets[0] == 0 and offsets[-1] == count and (np.diff(offsets) >= 0).all()
        return is_whole and all((folder / name).stat().st_size == size for name, (size, _) in sizes.items())
    except (OSError, ValueError, TypeError, AttributeError, EOFError, IndexError):
        return False


def verify(folder: Path) -> list[str]:
    """Return the names of the files in a cache entry whose sha256 differs from the manifest's."""
    sums = json.loads((folder / "manifest.json").read_text())
    return [name for name, (_, sha256) in sums.items() if storage.sha256(folder / name) != sha256]


def _build(source: Source, tokenizer: Tokenizer, folder: Path, *, progress: Progress) -> None:
    partial = folder.with_suffix(".partial")
    partial.mkdir(exist_ok=True)
    files, lengths = [], [np.zeros(1, np.int64)]
    for start, texts in chunks(source):
        stop = start + len(texts)
        file = partial / f"{start:09}-{stop:09}.npz"
        chunk = _read_chunk(file)
        if chunk is None:
            try:
                rows = tokenizer([_without_surrogates(text) for text in texts])
            except TextFault as fault:
                where = place_of(source, start + fault.index)
                raise DataError(f"{where}: {fault}; or leave such ones out with data.on_bad_sample=skip") from None
            ids = np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32, casting="same_kind")
            chunk = ids, np.array([len(row) for row in rows], dtype=np.int64)
            temporary = file.with_suffix(".tmp.npz")
            np.savez(temporary, ids=chunk[0], lengths=chunk[1])
            temporary.replace(file)
        files.append(file)
        lengths.append(chunk[1])
        progress(stop, len(source))
    whole = folder.with_suffix(".whole")
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    offsets = np.cumsum(np.concatenate(lengths))
    _join(files, whole / "ids.npy", count=int(offsets[-1]))
    np.save(whole / "offsets.npy", offsets)
    sums = {path.name: (path.stat().st_size, storage.sha256(path)) for path in sorted(whole.iterdir())}
    storage.write(whole / "manifest.json", json.dumps(sums))
    shutil.rmtree(folder, ignore_errors=True)
    whole.replace(folder)
    shutil.rmtree(partial)


def _join(files: Sequence[Path], target: Path, *, count: int) -> None:
    """Write the tokens of all chunks into one file, one chunk after the other: all at once may not fit into memory."""
    with target.open("wb") as out:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.int32)), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(out, header)
        for file in files:
            chunk = _read_chunk(file)
            if chunk is None:
                raise OSError(f"{file} has gone")
            out.write(chunk[0].tobytes())


def _read_chunk(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Read (ids, lengths) of a chunk from an earlier build; None if it is missing or truncated."""
    try:
        with storage.regular(path) as file:
            storage.check_archive(file, path.stat().st_size)
            stored = np.load(file)
            return stored["ids"], stored["lengths"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which are not characters and which tokenizers reject."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
