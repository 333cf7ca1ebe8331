"""Train the MNIST CNN with DDP, with the flags of PyTorch's example; writes a state dict.

    python scripts/mnist_ddp.py [--epochs 14] [--batch-size 64] [--data-dir FOLDER] [--nprocs 2] ...
    python scripts/mnist_ddp.py --data digits          # small images that come with scikit-learn: no download
    torchrun --nproc-per-node=2 scripts/mnist_ddp.py ...

All of them give the same weights, bit for bit, on any number of processes. MNIST is downloaded to data/mnist if it is
not there. The optimizer is AdamW. The run's folder has the same weights with all that is needed to use them:
`lockstep predict runs/NAME FOLDER_OF_IMAGES --out labels.csv`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from ddp_script import ScriptFlags, run, shared_sections

import lockstep
from lockstep.base.events import EpochDone


class EpochDecay:
    """Multiplies the learning rate by gamma after every epoch, like StepLR with a step size of 1."""

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def notice(self, event: object) -> lockstep.ScaleLearningRate | None:
        return lockstep.ScaleLearningRate(self.gamma) if isinstance(event, EpochDone) else None

    def close(self) -> None:
        pass


def observers(options: dict[str, Any]) -> list[EpochDecay]:
    """Lockstep calls this, since `observe.file` names this file."""
    return [EpochDecay(options["gamma"])]


def main(words: list[str]) -> int:
    """Read the flags, train and write the weights; returns the exit code."""
    flags = ScriptFlags((__doc__ or "").partition("\n\n")[0], separator="-")
    flags.flag("data", choices=("mnist", "digits"), default="mnist", help="(default: %(default)s)")
    flags.flag("test batch size", type=int, default=1000, help="(default: %(default)s)")
    flags.flag("gamma", type=float, default=0.7, help="factor of the learning rate per epoch (default: %(default)s)")
    flags.flag("dry run", action="store_true", help="one step only")
    flags.flag("log interval", type=int, default=10, help="steps between logged ones (default: %(default)s)")
    flags.flag("save model", action=argparse.BooleanOptionalAction, default=True, help="write --output")
    given = flags.read(words, epochs=14.0, lr=1e-3, batch_size=64, num_samples=0, output=Path("mnist_cnn.pt"), seed=1)
    if given.gamma <= 0:
        flags.error(f"--gamma {given.gamma:g}: it should be above 0; 1 keeps the learning rate")

    sections = shared_sections(given, "mnist-cnn")
    sections["data"] |= {"kind": given.data}
    if given.data_dir and given.data == "mnist":
        sections["data"]["root"] = given.data_dir
    sections["model"] = {"kind": "cnn"}
    sections["schedule"] = {"shape": "constant"}
    sections["train"] |= {"epochs": None, "steps": 1} if given.dry_run else {}
    sections["evaluate"]["micro_batch"] = given.test_batch_size
    sections["observe"] = {"log_every": given.log_interval}
    if given.gamma != 1:
        sections["observe"] |= {"file": Path(__file__).resolve(), "options": {"gamma": given.gamma}}
    if not given.save_model:
        given.output = None
    return run(sections, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
