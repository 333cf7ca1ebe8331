"""Uploads an export, or the folder of a Space, to an object store.

An object store cannot replace several files at once. So lockstep.json, without which there is no export, is deleted
first and written last, and meanwhile a file lists what is being uploaded: after a kill, the next upload continues.
"""

import json
from collections.abc import Callable
from pathlib import Path

from lockstep.base.errors import ModelError
from lockstep.base.remote_path import RemotePath
from lockstep.core.host import remote_storage
from lockstep.inference.export import export_facts, space
from lockstep.inference.export.export_facts import ExportFacts

UNFINISHED = "lockstep-upload.json"
"""File with the names of all files of the previous upload, and of the unfinished one."""


def prepared(place: RemotePath, *, is_space: bool) -> Callable[[Path, ExportFacts], str]:
    """Check the place before an export -> a function that uploads a folder and returns its URL. Raises UserError."""
    prefix = f"{space.MODEL}/" if is_space else ""
    facts = f"{prefix}{export_facts.FILE}"
    old = _previous_files(place, facts, prefix)

    def upload(folder: Path, _: ExportFacts) -> str:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        remote_storage.write(place / UNFINISHED, json.dumps(sorted(old | names)).encode())
        remote_storage.remove(place, [facts])
        remote_storage.upload(folder, place, sorted(names - {facts}))
        remote_storage.upload(folder, place, [facts])
        remote_storage.remove(place, [*sorted(old - names), UNFINISHED])
        return str(place)

    return upload


def _previous_files(place: RemotePath, facts: str, prefix: str) -> set[str]:
    """List the files of an earlier export at a place, which the next one replaces. Raises ModelError for any others."""
    held = remote_storage.listed(place).keys()
    known = set[str]()
    try:
        if UNFINISHED in held:
            known |= set(json.loads(remote_storage.read(place / UNFINISHED)))
        if facts in held:
            known |= {facts, *(f"{prefix}{name}" for name in json.loads(remote_storage.read(place / facts))["files"])}
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{place} holds an export that cannot be read: name another place with --to") from None
    if held and not known:
        raise ModelError(f"{place} holds other files, such as {min(held)!r}: name an empty place with --to")
    return known & held
