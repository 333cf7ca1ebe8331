"""Run torchrun with one worker per GPU; called by run_ddp.sh and run_ddp.bat.

    python scripts/run_ddp.py [GPUS] [section.key=value ...]

GPUS: how many processes; default: one per GPU, or 2 if there is no GPU. The config is examples/mnist.yaml, or the file
in the environment variable CONFIG.
"""

import os
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "mnist.yaml"


def main(arguments: list[str]) -> int:
    """Check the config, then run it under torchrun; returns the exit code of the first process that failed."""
    if {"-h", "--help"} & set(arguments):
        print((__doc__ or "").partition("\n\n")[2].strip())
        return 0
    has_number = bool(arguments) and "=" not in arguments[0]
    gpus, overrides = (arguments[0], arguments[1:]) if has_number else ("", arguments)
    if gpus and not (gpus.isascii() and gpus.isdigit() and int(gpus) > 0):
        print(f"GPUS should be a number above 0, not {gpus!r}; a config is named by CONFIG={gpus}", file=sys.stderr)
        return 2

    from lockstep.base.errors import LockstepError
    from lockstep.run import recipe

    config = os.environ.get("CONFIG") or str(EXAMPLE)
    try:
        recipe.load(Path(config), overrides)
    except LockstepError as error:  # once, not once per process
        print(error, file=sys.stderr)
        return error.exit_code
    import torch

    return under_torchrun(int(gpus or 0) or torch.cuda.device_count() or 2, config, overrides)


def under_torchrun(processes: int, config: str, overrides: list[str]) -> int:
    """Like `torchrun --standalone --nproc-per-node=N -m lockstep.run.worker CONFIG ...`, without its traceback."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lockstep.base.errors import Interrupted

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's default, without its warning; run.threads replaces it
    if os.name == "nt":
        os.environ["USE_LIBUV"] = "0"  # PyTorch for Windows is built without libuv
    command = ["--standalone", f"--nproc-per-node={processes}", "-m", "lockstep.run.worker", config, *overrides]
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
