"""Run torchrun with one process per GPU; called by run_ddp.sh and run_ddp.bat.

    python scripts/run_ddp.py [GPUS] [CONFIG.yaml] [section.key=value ...]
    python scripts/run_ddp.py [GPUS] SCRIPT.py [ARGUMENT ...]

GPUS: how many processes; default: one per GPU, or 2 if there is no GPU. The config is CONFIG.yaml, or the file in the
environment variable CONFIG, or examples/mnist.yaml. SCRIPT.py is a training script such as scripts/train_ddp.py.
"""

import os
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "mnist.yaml"


def main(arguments: list[str]) -> int:
    """Check the config, then run it under torchrun; returns the exit code of the first process that failed."""
    first, *rest = arguments or ["="]
    has_number = not ("=" in first or first.startswith("-") or first.endswith((".py", ".yaml", ".yml")))
    gpus, words = (first, rest) if has_number else ("", [*arguments])
    has_script = bool(words) and words[0].endswith(".py")
    if not has_script and {"-h", "--help"} & set(words):
        print((__doc__ or "").partition("\n\n")[2].strip())
        return 0
    if gpus and not (gpus.isascii() and gpus.isdigit() and int(gpus) > 0):
        print(f"GPUS should be a number above 0, not {gpus!r}; then CONFIG.yaml or SCRIPT.py", file=sys.stderr)
        return 2
    if not has_script and (code := _prepare(words)):
        return code
    if has_script and not Path(words[0]).is_file():
        print(f"there is no file {words[0]}", file=sys.stderr)
        return 2
    import torch

    program = words if has_script else ["-m", "lockstep.run.worker", *words]
    return under_torchrun(int(gpus or 0) or torch.cuda.device_count() or 2, program)


def _prepare(words: list[str]) -> int:
    """Put the config before the settings, if it is not there, and check it -> exit code."""
    from lockstep.base.errors import LockstepError
    from lockstep.recipe import recipe

    if not (words and words[0].endswith((".yaml", ".yml"))):
        words.insert(0, os.environ.get("CONFIG") or str(EXAMPLE))
    try:
        recipe.load(Path(words[0]), words[1:])
    except LockstepError as error:  # once, not once per process
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def under_torchrun(processes: int, program: list[str]) -> int:
    """Like `torchrun --standalone --nproc-per-node=N PROGRAM ...`, without its traceback."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lockstep.base.errors import Interrupted

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning; run.threads replaces it
    if os.name == "nt":
        os.environ["USE_LIBUV"] = "0"  # PyTorch for Windows is built without libuv
    command = ["--standalone", f"--nproc-per-node={processes}", *program]
    try:
        run.run(run.parse_args(command))
    except ChildFailedError as error:  # the processes have printed the reason
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # ended by a signal: 128 + its number, as in a shell
    except (SignalException, KeyboardInterrupt):
        return Interrupted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
