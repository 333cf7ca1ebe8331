"""What train_ddp.py and mnist_ddp.py share: their flags, the start by `python` or torchrun, the file of weights."""

import argparse
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import lockstep

UNDER_TORCHRUN = "RANK" in os.environ
IS_MAIN = os.environ.get("RANK", "0") == "0"
PATIENCE_SECONDS = 10.0
"""For which other processes leave it to the main one to tell a mistake: torchrun ends all once one has exited."""
METAVARS = {int: "N", float: "X", Path: "PATH"}
BATCHES = (
    "--batch{s}size is what one process holds in a pass: the micro-batch. A step trains the global batch, on any\n"
    "number of processes: --global{s}batch{s}size, or else 2 x --batch{s}size x --gradient{s}accumulation{s}steps, as\n"
    "the usual script does on 2 processes. For P processes give at least P x --batch{s}size, or some are idle."
)


class ScriptFlags(argparse.ArgumentParser):
    """Flags that may be typed with - or _ between their words; mistakes are reported by one process only."""

    def __init__(self, what: str, *, separator: str) -> None:
        text = f"{what}\n\n{BATCHES.format(s=separator)}"
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.separator = separator

    def flag(self, *names: str, **options: Any) -> None:
        """Add a flag by its words, such as "batch size", and other names for it."""
        strings = (f"--{self.separator.join(name.split())}" for name in names)
        shown = {"metavar": METAVARS[options["type"]]} if "type" in options else {}
        self.add_argument(*strings, **{"dest": names[0].replace(" ", "_"), **shown, **options})

    def read(self, words: Sequence[str], **defaults: Any) -> argparse.Namespace:
        """Parse a command line with the flags that both scripts have. Sets the device for all that is started."""
        self._add_shared()
        self.set_defaults(**defaults)
        given = self.parse_intermixed_args([self._spelled(word) for word in words])
        if UNDER_TORCHRUN and given.nprocs not in (None, int(os.environ["WORLD_SIZE"])):
            self.error("torchrun's --nproc-per-node sets the number of processes: leave out --nprocs")
        if given.resume is not None and not (given.resume / "recipe.yaml").is_file():
            self.error(f"--resume {given.resume}: there is no run in this folder; give one such as runs/NAME")
        self._choose_device(given)
        return given

    def error(self, message: str) -> NoReturn:
        """Say it once, however many processes find it, and exit with 2."""
        if not IS_MAIN:
            time.sleep(PATIENCE_SECONDS)
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n" if IS_MAIN else None)

    def _add_shared(self) -> None:
        self.flag("epochs", type=float, help="passes over the training samples (default: %(default)s)")
        self.flag("lr", type=float, help="learning rate of AdamW (default: %(default)s)")
        self.flag("batch size", type=int, help="samples in a pass of one process (default: %(default)s)")
        self.flag("gradient accumulation steps", type=int, default=1, help="multiplies the global batch")
        self.flag("global batch size", type=int, help="samples of a step, over all processes together")
        self.flag(
            "num samples", type=int, help="use so many for training and for testing; 0: all (default: %(default)s)"
        )
        self.flag("data dir", type=Path, help="folder with the data's files (default: data)")
        self.flag("output", type=Path, help="file for the weights (default: %(default)s)")
        self.flag("run dir", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
        self.flag("resume", type=Path, metavar="RUN", help="go on with the run in this folder, same flags as before")
        self.flag("seed", type=int, default=42, help="(default: %(default)s)")
        self.flag("num workers", type=int, default=0, help="loader processes of each process (default: %(default)s)")
        self.set_defaults(precision="fp32")
        precision = self.add_mutually_exclusive_group()
        for kind in ("fp16", "bf16"):
            precision.add_argument(
                f"--{kind}", dest="precision", action="store_const", const=kind, help=f"autocast to {kind}"
            )
        self.flag("nprocs", "world size", type=int, help="processes, when started by python (default: one per GPU)")
        self.flag("device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPUs, if there are any")
        self.flag("no cuda", "no accel", dest="device", action="store_const", const="cpu", help="like --device cpu")
        self.flag("backend", choices=("auto", "gloo", "nccl"), default="auto", help="gloo: CPU; nccl: GPUs")
        self.flag("local rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it; the environment has it too
        self.add_argument("settings", nargs="*", help="any setting of a config, such as parallel.kind=fsdp")

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return f"--{re.sub('[-_]', self.separator, name[2:])}{equals}{value}" if word.startswith("--") else word

    def _choose_device(self, given: argparse.Namespace) -> None:
        of_backend = {"gloo": "cpu", "nccl": "cuda"}.get(given.backend, given.device)
        if given.device not in ("auto", of_backend):
            self.error(f"--backend {given.backend} does not go with --device {given.device}: leave out one of them")
        if of_backend == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        elif of_backend == "cuda":
            import torch

            if not torch.cuda.is_available():
                self.error("there is no GPU: leave out --device and --backend, or give --device cpu")


class Heard(io.StringIO):
    """A stderr that passes everything on and keeps it: what rank 0 has said already is not repeated."""

    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        sys.__stderr__.flush()
        return super().write(text)


def shared_sections(given: argparse.Namespace, name: str) -> dict[str, dict[str, Any]]:
    """The sections of a config that both scripts have; `name` begins the names of their runs."""
    accumulated = given.batch_size * given.gradient_accumulation_steps
    folder = given.resume or given.run_dir / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"  # torchrun: rank 0's holds
    return {
        "run": {"dir": folder.absolute().parent, "name": folder.absolute().name, "seed": given.seed},
        "data": {"limit": given.num_samples or None, "workers": given.num_workers},
        "train": {
            "epochs": given.epochs,
            "micro_batch": given.batch_size,
            "global_batch": given.global_batch_size or 2 * accumulated,
            "precision": given.precision,
        },
        "optim": {"lr": given.lr},
        "evaluate": {"limit": given.num_samples or None},
        "export": {"kind": "state_dict", "file": given.output.name},
    }


def run(sections: Mapping[str, Any], given: argparse.Namespace) -> int:
    """Train, then write the weights to `given.output`, if any; returns the exit code.

    Under torchrun, every process calls this, and does its part.
    """
    from lockstep.base.errors import LockstepError
    from lockstep.recipe import recipe as recipes

    heard = Heard()
    try:
        folder = recipes.of_sections(sections, given.settings).folder
        if given.output is not None:
            given.output.parent.mkdir(parents=True, exist_ok=True)
        if UNDER_TORCHRUN:
            if code := _work(sections, given.settings):
                return code
        else:
            with redirect_stderr(heard):
                lockstep.train(sections, *given.settings, processes=given.nprocs)
        if IS_MAIN and given.output is not None:
            _save(folder, given.output)
    except (LockstepError, OSError) as error:
        if not IS_MAIN:
            time.sleep(PATIENCE_SECONDS)
        elif str(error) not in heard.getvalue():
            print(error, file=sys.stderr)
        return getattr(error, "exit_code", 2)
    return 0


def _work(sections: Mapping[str, Any], settings: Sequence[str]) -> int:
    """What `torchrun -m lockstep.run.worker CONFIG ...` runs in each process -> its exit code."""
    from lockstep.run import worker

    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "config.yaml"
        config.write_text(json.dumps(sections, default=str), encoding="utf-8")  # JSON is YAML
        return worker.main([str(config), *settings])


def _save(run_folder: Path, output: Path) -> None:
    """Export the state dict of a finished run: unwrapped names, the same for any strategy and number of processes."""
    from lockstep.inference import trained_model
    from lockstep.inference.export import export_reader

    facts, folder = trained_model.export(run_folder, None, None)
    shutil.copyfile(folder / facts.file, output)
    if (tokenizer := export_reader.tokenizer_of(folder, facts)) is not None:
        beside = output.with_name(f"{output.stem}_tokenizer")
        beside.mkdir(exist_ok=True)
        tokenizer.save(beside)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in facts.metrics.items())
    print(f"{output}: {scores}; digest {facts.digest}")
