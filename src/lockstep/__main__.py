"""The command `lockstep`, also as `python -m lockstep`: Ctrl-C is answered before anything slow is imported."""

import os

from lockstep.base import closed_output, ctrl_c


def main() -> None:
    ctrl_c.ends_at_once()
    os.environ["PYTHONSAFEPATH"] = "1"  # noqa: TID251 (what is started imports nothing from the working folder)
    closed_output.survives()
    from lockstep.cli import _app  # noqa: PLC0415 (Ctrl-C has to be answered before)

    _app.main()


if __name__ == "__main__":
    main()
