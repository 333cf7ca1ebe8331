"""A Hugging Face Space: an export in a folder that is a git repository's, with what is needed to build and serve it."""

import errno
from importlib.metadata import version
from pathlib import Path

import torch
import yaml

from lockstep.base import storage
from lockstep.base.errors import ModelError
from lockstep.inference.export.export_facts import ExportFacts

FOLDER, MODEL = "space", "model"
"""In the run's folder; and in that one, the export."""
PORT = 7860
"""Where Spaces look for a server, if they are not told otherwise."""
PACKAGE = "lockstep-train"
ATTRIBUTES = ".gitattributes"
LARGE = ("*.safetensors", "*.pt", "*.pt2", "*.pth", "*.bin", "*.ckpt", "*.onnx", "*.onnx.data", "tokenizer.json")
"""Files that may have more than the 10 MB that the hub takes without LFS."""
MOST_BYTES = 1 << 20
"""Of a file of words."""
OURS = "# Written by `lockstep export --space`, each time anew."

DOCKERFILE = """\
{ours} It serves the export in model/.
# As a Space builds it, so it can be tried here:
#   docker build --tag space . && docker run --rm --publish {port}:{port} space
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 \\
    PIP_NO_CACHE_DIR=1 \\
    PIP_DISABLE_PIP_VERSION_CHECK=1

# the user that a Space runs as; and torch by itself, for processors only, which is much smaller
RUN useradd --uid 1000 --create-home user \\
    && pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \\
    --extra-index-url https://pypi.org/simple torch=={torch}

ARG VERSION={version}
RUN pip install --no-cache-dir "{package}==${{VERSION}}"

USER 1000:1000
ENV HOME=/home/user \\
    HF_HUB_OFFLINE=1
WORKDIR /app
COPY --chown=1000:1000 model ./model

EXPOSE {port}
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \\
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:{port}/health', timeout=4)"]
CMD ["lockstep", "serve", "/app/model", "--host", "0.0.0.0", "--port", "{port}"]
"""

README = """\
---
{front}---

# {name}

A model that sorts {modality}s into {classes} classes, with a page to try it on and an HTTP interface.
`model/` is what `lockstep export` has written; `model/README.md` says how good it is and how it was made.
"""


def check(folder: Path) -> None:
    """Raise ModelError where the folder holds what would have to be replaced and is not a Space's."""
    reason = None
    if folder.exists() and not folder.is_dir():
        reason = "is no folder"
    try:
        if not (_there(folder / "Dockerfile") or OURS).startswith(OURS):
            reason = "has another Dockerfile"
        elif "\nsdk: docker\n" not in (_there(folder / "README.md") or "\nsdk: docker\n"):
            reason = "has a README.md that is no Docker Space's"
        _there(folder / ATTRIBUTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"holds a file that cannot be read ({error})"
    if reason is not None:
        raise ModelError(f"{folder} {reason}: name another folder with --to, such as the clone of a Docker Space")


def _there(file: Path) -> str | None:
    """The text of a file, if it is there. Raises OSError, also for a link, which might lead out of a repository, and
    UnicodeDecodeError."""
    if file.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(file))
    return storage.read(file, MOST_BYTES).decode("utf-8") if file.exists() else None


def write(folder: Path, facts: ExportFacts) -> None:
    """What belongs beside the export; a README.md that is there stays, as it may have been edited, and .gitattributes
    gets the patterns that it lacks.

    Raises ModelError where they cannot be written.
    """
    try:
        for name, text in texts(facts).items():
            file = folder / name
            if name == "Dockerfile" or not file.exists():
                storage.write(file, text)
            elif name == ATTRIBUTES:
                there = (_there(file) or "").splitlines()
                told = {line.split()[0] for line in there if line.strip()}
                lacking = [line for line in text.splitlines() if line.split()[0] not in told]
                storage.write(file, "\n".join([*there, *lacking, ""]))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"{ATTRIBUTES} is not UTF-8"
        raise ModelError(f"cannot write to {folder}: {reason}; name another folder with --to") from error


def texts(facts: ExportFacts) -> dict[str, str]:
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
    return {
        "README.md": README.format(
            front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
            name=facts.name,
            modality=facts.modality,
            classes=len(facts.labels),
        ),
        "Dockerfile": DOCKERFILE.format(
            ours=OURS,
            port=PORT,
            torch=torch.__version__.partition("+")[0],
            package=f"{PACKAGE}[onnx,serve]" if facts.kind == "onnx" else f"{PACKAGE}[serve]",
            version=version(PACKAGE),
        ),
        ATTRIBUTES: "".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in LARGE),
    }
