"""Checks the files that the library `datasets` opens: those that a folder names lie inside it, and all are whole."""

import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import yaml

from lockstep.base import storage
from lockstep.base.errors import DataError
from lockstep.base.yaml_text import MOST_LEVELS
from lockstep.data.tables import metered, parquet_batches, read_errors

ARROW, PARQUET, IMAGES = "arrow", "parquet", "imagefolder"
FORMS = ("csv", "json", "text", "webdataset", "audiofolder", ARROW, PARQUET, IMAGES)
"""Formats of a folder that are read: files of others, such as HDF5, may refer to further files."""
DICT, STATE = SAVED = ("dataset_dict.json", "state.json")
"""Files of which one is in a folder that save_to_disk wrote."""
MOST_SETTINGS_BYTES = 1 << 19
"""Limit of a settings file; PyYAML takes five seconds for it."""
OUTSIDE = re.compile(r"^[/\\~]|(^|[/\\])\.\.([/\\]|$)|:/|::")
"""Pattern of a name outside of a folder: absolute, a step up, a URL, or a chain of them."""
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b'\x04"M\x18': "lz4"}
"""How a file begins -> fsspec's name of its form."""
UNREAD = (b"Rar!", b"7z\xbc\xaf\x27\x1c")


def builder_of(folder: Path, subset: str | None, cache: Path) -> Any:
    """Return the builder of `datasets` for a local folder. Raises DataError for damaged files and those outside."""
    from datasets import load_dataset_builder

    for path in filter(Path.exists, (folder / "README.md", folder / ".huggingface.yaml")):
        storage.require_inside([path], folder)
        if wrong := next(filter(OUTSIDE.search, _named(_settings(path))), None):
            raise DataError(f"{path} names {wrong!r}: what a folder names has to lie inside it")
    builder: Any = load_dataset_builder(str(folder), subset)
    if (form := type(builder).__module__.rpartition(".")[2]) not in FORMS:
        raise DataError(f"{folder} holds files of {form}: what is read of a folder is {', '.join(FORMS)}")
    paths = {Path(file): None for files in builder.config.data_files.values() for file in files}
    storage.require_inside(paths, folder)
    for path in paths:
        if form != IMAGES or path.suffix in (".zip", ".parquet", ".jsonl"):
            _check_once(path, PARQUET if path.suffix == ".parquet" else form, cache)
    return builder


def _settings(path: Path) -> Any:
    """Return the YAML of a file, or of the block before a text. Raises DataError for aliases or deep nesting."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    text, levels = storage.read_regular(path, MOST_SETTINGS_BYTES).decode(), 0
    if path.suffix == ".md":
        text = block[2] if (block := REGEX_YAML_BLOCK.search(text)) else ""
    for event in yaml.parse(text):
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or levels > MOST_LEVELS:
            raise DataError(f"{path} holds aliases (*), or more than {MOST_LEVELS} levels: write them out")
    return yaml.safe_load(text)


def _named(value: Any, *, is_name: bool = False) -> Iterator[str]:
    """Yield the names of files and folders in settings."""
    if isinstance(value, str) and is_name:
        yield value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from _named(each, is_name=is_name or key in ("data_files", "data_dir"))


def check_saved(folder: Path, cache: Path) -> None:
    """Raise DataError where what save_to_disk wrote names files outside of its folder, or damaged ones."""
    splits = storage.read_json(folder / DICT)["splits"] if (folder / DICT).is_file() else ()
    folders = [each for each in (folder, *(folder / split for split in splits)) if (each / STATE).is_file()]
    storage.require_inside((each / STATE for each in folders), folder)
    paths = [each / file["filename"] for each in folders for file in storage.read_json(each / STATE)["_data_files"]]
    storage.require_inside(paths, folder)
    for path in paths:
        _check_once(path, ARROW, cache)


def check_mapped(table: Any, cache: Path) -> None:
    """Raise DataError where the files of a `datasets.Dataset` are damaged."""
    for file in table.cache_files:
        _check_once(Path(file["filename"]), ARROW, cache)


def _check_once(path: Path, form: str, cache: Path) -> None:
    """Raise DataError for a file that is damaged, or becomes too large. One that was whole is not read again."""
    found = path.stat()
    facts = [form, str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    known = cache / "checked" / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    if not known.exists():
        with read_errors(path):
            for _ in _arrow_batches(path) if form == ARROW else _parts(path, form):
                pass
        with suppress(OSError):  # else it is read again the next time
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield validated batches: offsets beyond a column would read other columns, or end the process with a signal."""
    with pa.memory_map(str(path)) as source:
        try:
            batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(source)
        except (OSError, pa.ArrowInvalid):
            file = pa.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        for batch in metered(path, batches, pa.RecordBatch.get_total_buffer_size):
            batch.validate(full=True)
            yield batch


def _parts(path: Path, form: str) -> Iterator[Any]:
    with storage.regular(path) as file:
        start = file.read(8)
    if start.startswith(UNREAD):
        raise DataError(f"{path} is a RAR or 7z archive, which is not read: unpack it")
    if form == PARQUET:
        yield from parquet_batches(path, lambda *_: None)
        return
    if kind := next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None):
        with fsspec.open(str(path), compression=kind) as unpacked:
            yield from metered(path, iter(partial(unpacked.read, 1 << 20), b""), len)
    elif path.suffix in (".jsonl", ".ndjson"):
        _check_lines(path)
    if (kind is None or path.suffix == ".zip") and zipfile.is_zipfile(path):  # which looks at the end
        with zipfile.ZipFile(path) as entries:
            yield from metered(path, entries.infolist(), lambda entry: entry.file_size)
    if tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            yield from metered(path, archive, lambda entry: entry.size)


def _check_lines(path: Path) -> None:
    """Raise DataError for a line that begins with no object: pyarrow's reader may end the process there."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if (content := line.lstrip(b"\xef\xbb\xbf \t\r\n")) and not content.startswith(b"{"):
                raise DataError(f"{path}, line {number}: each line of such a file is an object, {{...}}")
