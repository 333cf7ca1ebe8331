"""What somebody else may have put into the files of a checkpoint, a run or an export: bytes that would run code."""

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path

from fuzzing import CANARY


class Shell:
    """Unpickled, it runs a command of the shell, which leaves the canary in the working folder."""

    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


def pickled(protocol=2):
    return pickle.dumps(Shell(), protocol)


def archived(file, **parts):
    """An archive as torch.save writes it whose pickle runs code; `parts` are more entries, or others."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickled(), "version": b"3\n", "byteorder": b"little", **parts}.items():
            archive.writestr(f"archive/{name}", content)


def sealed(checkpoint, **changes):
    """Give a checkpoint's manifest other fields, and whatever lies beside it its true sizes and sums: a manifest that
    is valid, by somebody who knows how it is made."""
    file = Path(checkpoint, "manifest.json")
    body = json.loads(file.read_bytes())
    del body["sha256"]
    others = sorted(path for path in Path(checkpoint).iterdir() if path.name != "manifest.json")
    body["files"] = {path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in others}
    body |= changes
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    file.write_text(json.dumps({**body, "sha256": own}, indent=1), encoding="utf-8")
