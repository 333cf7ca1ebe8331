"""Reads an export that holds a user's file in a new process, which cannot import what lies beside the original."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lockstep.base import plugins, trust
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward
from lockstep.core.modules.outputs import tensors
from lockstep.core.numerics.seeds import seed_all
from lockstep.inference.export import export_facts, export_reader
from lockstep.inference.export.round_trip import compare, judge, outputs

START = "import sys; sys.path.append(sys.argv[1]); from lockstep.inference.export.fresh_read import main; main()"
HINT = (
    "An export takes along what the model's file imports from its own folder by import statements: other code has to "
    "be an installed package, and another file an absolute path in model.options"
)


def check(folder: Path, again: Forward, batch: Batch) -> None:
    """Raise ModelError unless the export, read in a new process and another folder, answers as `again` does."""
    with tempfile.TemporaryDirectory() as elsewhere:
        file = Path(elsewhere, "batch.pt")
        torch.save(batch, file)
        hidden = [str(each) for each in trust.FOLDERS if each != folder]
        command = [sys.executable, "-P", "-c", START, str(plugins.ROOT.parent), str(folder), str(file), *hidden]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
            raise ModelError(
                f"the export was read in a new process, in another folder, and cannot be used there ({reason}); "
                f"nothing was kept. {HINT}"
            )
        answers: list[Tensor] = torch.load(file, weights_only=True)
    judge(compare(lambda _: tensors(outputs(again, batch)), lambda _: answers, [batch]))


def main() -> None:
    """Run the new process: its arguments are a folder with lockstep in it, the export, a batch, and folders not to
    be imported from. Replaces the batch by the tensors of the outputs."""
    folder, file, *hidden = map(Path, sys.argv[2:])
    sys.path[:] = [entry for entry in sys.path if not any(Path(entry).absolute() == each for each in hidden)]
    try:
        facts = export_facts.read(folder)
        trust.own(export_reader.code_of(folder, facts))
        forward = export_reader.forward_of(folder, facts)
        export_reader.metrics_of(folder, facts)
        seed_all(0)
        torch.save(tensors(outputs(forward, torch.load(file, weights_only=True))), file)
    except Exception as error:  # of the user's code
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
