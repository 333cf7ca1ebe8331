"""What run_ddp.sh and run_ddp.bat run, in an environment that has Lockstep: torchrun with a worker for each GPU.

    python scripts/run_ddp.py [GPUS] [section.key=value ...]

GPUS: how many processes; all GPUs that there are by default, or 2 processes where there is none. The config is
examples/mnist.yaml, or the file that the variable CONFIG names.
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
    is_named = bool(arguments) and "=" not in arguments[0]
    wanted, overrides = (arguments[0], arguments[1:]) if is_named else ("", arguments)
    if wanted and not (wanted.isascii() and wanted.isdigit() and int(wanted) > 0):
        print(f"GPUS should be a number above 0, not {wanted!r}; a config is named by CONFIG={wanted}", file=sys.stderr)
        return 2

    from lockstep.base.errors import LockstepError
    from lockstep.run import recipe

    config = os.environ.get("CONFIG") or str(EXAMPLE)
    try:
        recipe.load(Path(config), overrides)
    except LockstepError as error:  # once, and not by every process
        print(error, file=sys.stderr)
        return error.exit_code
    import torch

    return under_torchrun(int(wanted or 0) or torch.cuda.device_count() or 2, config, overrides)


def under_torchrun(processes: int, config: str, overrides: list[str]) -> int:
    """As `torchrun --standalone --nproc-per-node=N -m lockstep.run.worker CONFIG ...`, without its traceback."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from lockstep.base.errors import Interrupted

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own value, which it announces; run.threads replaces it
    if os.name == "nt":
        os.environ["USE_LIBUV"] = "0"  # PyTorch for Windows is built without it
    command = ["--standalone", f"--nproc-per-node={processes}", "-m", "lockstep.run.worker", config, *overrides]
    try:
        run.run(run.parse_args(command))
    except ChildFailedError as error:  # the processes have said what happened
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # ended by a signal: as a shell says it
    except (SignalException, KeyboardInterrupt):
        return Interrupted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
