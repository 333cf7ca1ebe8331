"""A Hugging Face Space: an export in the folder of a git repository, with the files that build and serve it."""

import errno
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from lockstep.base import storage
from lockstep.base.errors import ModelError
from lockstep.base.templates import render
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.model_card import purpose_of

FOLDER, MODEL = "space", "model"
"""The Space's folder in the run's folder, and the export's folder in the Space."""
PORT = 7860
"""Port on which Spaces expect a server by default."""
PACKAGE = "lockstep-train"
ATTRIBUTES = ".gitattributes"
LFS_PATTERNS = ("*.safetensors", "*.pt", "*.pt2", "*.pth", "*.bin", "*.ckpt", "*.onnx", "*.onnx.data", "tokenizer.json")
"""Files that may exceed the 10 MB that the hub accepts without LFS."""
MAX_TEXT_BYTES = 1 << 20
MARKER = "# Written by `lockstep export --space`, each time anew."
"""First words of a Dockerfile that may be replaced."""


def check(folder: Path) -> None:
    """Raise ModelError if the folder holds files that would be replaced and do not belong to a Docker Space."""
    reason = None
    if folder.exists() and not folder.is_dir():
        reason = "is no folder"
    try:
        if not (_read_text(folder / "Dockerfile") or MARKER).startswith(MARKER):
            reason = "has another Dockerfile"
        elif "\nsdk: docker\n" not in (_read_text(folder / "README.md") or "\nsdk: docker\n"):
            reason = "has a README.md that is no Docker Space's"
        _read_text(folder / ATTRIBUTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"holds a file that cannot be read ({error})"
    if reason is not None:
        raise ModelError(f"{folder} {reason}: name another folder with --to, such as the clone of a Docker Space")


def _read_text(file: Path) -> str | None:
    """Return the text of a file, None if there is none. Raises UnicodeDecodeError, and OSError also for a symbolic
    link, which may lead out of the repository."""
    if file.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(file))
    return storage.read_regular(file, MAX_TEXT_BYTES).decode("utf-8") if file.exists() else None


def write(folder: Path, facts: ExportFacts) -> None:
    """Write the Space's own files. An existing README.md stays, as it may have been edited; .gitattributes gets the
    patterns that it lacks. Raises ModelError where they cannot be written."""
    try:
        for name, text in texts(facts).items():
            file = folder / name
            if name == "Dockerfile" or not file.exists():
                storage.write(file, text)
            elif name == ATTRIBUTES:
                lines = (_read_text(file) or "").splitlines()
                patterns = {line.split()[0] for line in lines if line.strip()}
                missing = [line for line in text.splitlines() if line.split()[0] not in patterns]
                storage.write(file, "\n".join([*lines, *missing, ""]))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"{ATTRIBUTES} is not UTF-8"
        raise ModelError(f"cannot write to {folder}: {reason}; name another folder with --to") from error


def texts(facts: ExportFacts) -> dict[str, str]:
    """Return the texts of the Space's files besides the export, by name."""
    front = {
        "title": facts.name,
        "emoji": "\N{DIRECT HIT}",
        "colorFrom": "blue",
        "colorTo": "indigo",
        "sdk": "docker",
        "app_port": PORT,
        "pinned": False,
        "tags": ["lockstep"],
    }
    needed = {"adapters": facts.kind == "adapter", "audio": facts.modality == "audio", "onnx": facts.kind == "onnx"}
    extras = [*(extra for extra, is_needed in needed.items() if is_needed), "serve"]
    return {
        "README.md": render(
            "inference/export/space_readme.md.j2",
            facts=facts,
            purpose=purpose_of(facts),
            front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        ),
        "Dockerfile": render(
            "inference/export/space_dockerfile.j2",
            marker=MARKER,
            port=PORT,
            torch=torch.__version__.partition("+")[0],
            package=f"{PACKAGE}[{','.join(extras)}]",
            version=version(PACKAGE),
        ),
        ATTRIBUTES: "".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in LFS_PATTERNS),
    }
