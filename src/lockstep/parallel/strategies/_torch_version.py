"""The check of a strategy that needs a newer torch than the others."""

from importlib.metadata import version


def require_torch(least: str, strategy: str) -> None:
    """Raise ValueError where the installed torch is older than `least`, such as 2.13."""
    here = version("torch")
    if _numbers(here) < _numbers(least):
        raise ValueError(
            f"{strategy} needs torch {least} or newer, and this is torch {here}: install a newer one, or set "
            "parallel.kind to ddp or single"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in version.split(".")[:2])
