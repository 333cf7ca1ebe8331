"""The command `lockstep`, also as `python -m lockstep`: what needs no torch is answered before torch is imported."""

import os
import sys

from lockstep import ctrl_c, output


def main() -> None:
    """Answer --version at once, everything else by the command line."""
    ctrl_c.ends_at_once()
    os.environ["PYTHONSAFEPATH"] = "1"  # noqa: TID251 (what is started imports nothing from the working folder)
    output.survives()
    if sys.argv[1:] == ["--version"]:
        from lockstep.terminal import versions  # noqa: PLC0415 (Ctrl-C has to be answered before)

        sys.stdout.write(f"{versions()}\n")
        return
    from lockstep import cli  # noqa: PLC0415 (it imports torch, which takes seconds)

    cli.main()


if __name__ == "__main__":
    main()
