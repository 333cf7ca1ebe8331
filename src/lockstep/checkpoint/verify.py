"""Verifies checkpoints before they are loaded: every byte against the manifest, the table of tensors against files."""

from collections.abc import Callable
from pathlib import Path

from lockstep.base import storage
from lockstep.checkpoint import tensor_table
from lockstep.checkpoint.layout import MANIFEST, listed, read_manifest


def problem(folder: Path, *, every_byte: bool = True) -> str | None:
    """Describe what is wrong with a checkpoint in a few words; None when every file is as it was written.

    Without `every_byte` only the manifest and the files' sizes are checked, which is quick.
    """
    try:
        manifest = read_manifest(folder)
        names = {path.name for path in folder.iterdir()} - {MANIFEST}
        if names != set(manifest.files):
            return f"files missing or added: {', '.join(sorted(names ^ set(manifest.files)))}"
        for name, (size, sha256) in manifest.files.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
            if every_byte and storage.sha256(folder / name) != sha256:
                return f"{name} has been changed (its sha256 differs)"
        if every_byte and {tensor_table.FILE, tensor_table.OF_TORCH} & manifest.files.keys():
            tensor_table.read(folder)  # a manifest with right hashes may be forged as well
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"
    return None


def newest(
    root: Path, on_skip: Callable[[Path, str], None], *, problem: Callable[[Path], str | None] = problem
) -> Path | None:
    """Return the newest checkpoint without a problem; `on_skip` is called with each newer one and its problem."""
    for folder in listed(root):
        reason = problem(folder)
        if reason is None:
            return folder
        on_skip(folder, reason)
    return None
