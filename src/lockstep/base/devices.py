"""The devices of a run: run.device and launch.share_gpus, which a process leaves to those that it starts."""

import os

from lockstep.base.errors import LaunchError
from lockstep.base.world import SHARES_GPUS, World

VISIBLE = "CUDA_VISIBLE_DEVICES"


def variables(device: str, *, shares_gpus: bool) -> dict[str, str]:
    """Return what a process and those that it starts read, if set before CUDA is initialized."""
    hidden = {VISIBLE: ""} if device == "cpu" else {}
    return hidden | ({SHARES_GPUS: "1"} if shares_gpus else {})


def choose(device: str, *, shares_gpus: bool) -> None:
    """Set these variables for the rest of this process."""
    os.environ.update(variables(device, shares_gpus=shares_gpus))


def count_gpus() -> int:
    """Return the number of GPUs of this machine that the run may use."""
    import torch  # noqa: PLC0415 (a config is checked without it)

    return 0 if os.environ.get(VISIBLE) == "" else torch.cuda.device_count()  # which stays once CUDA is initialized


def are_shared(world: World) -> bool:
    """Return whether processes of this node share GPUs."""
    return 0 < count_gpus() < world.local_size


def check(device: str) -> None:
    """Raise LaunchError where run.device asks for a GPU, and there is none."""
    if device == "cuda" and not count_gpus():
        import torch  # noqa: PLC0415

        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
        hidden = f"; {VISIBLE}={os.environ[VISIBLE]!r} hides GPUs" if VISIBLE in os.environ else ""
        raise LaunchError(
            f"run.device=cuda, but there is no GPU here that torch can use (torch {torch.__version__} {built}"
            f"{hidden}): set run.device=auto, or look at `nvidia-smi` and the driver's version"
        )
