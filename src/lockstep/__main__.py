"""The command `lockstep`, also as `python -m lockstep`: what needs no torch is answered before torch is imported."""

import sys

from lockstep.terminal import versions


def main() -> None:
    """Answer --version at once, everything else by the command line."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{versions()}\n")
        return
    from lockstep import cli  # noqa: PLC0415 (it imports torch, which takes seconds)

    cli.main()


if __name__ == "__main__":
    main()
