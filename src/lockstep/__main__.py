"""The command `lockstep`, also as `python -m lockstep`; handles Ctrl-C before it imports anything slow."""

import os
import sys
import time

from lockstep.base import closed_output, ctrl_c, hash_seed, loading


def main() -> None:
    began = time.time()
    ctrl_c.exit_at_once()
    if sys.argv[1:2] != ["serve"]:  # with a known seed, clients could send keys whose hashes collide
        hash_seed.fix()
    os.environ["PYTHONSAFEPATH"] = "1"  # noqa: TID251 (child processes import nothing from the working folder)
    closed_output.tolerate_lost_reader()
    loading.begin()
    from lockstep.base import lifetime  # noqa: PLC0415 (slow: Ctrl-C has to be handled before)

    lifetime.began = began
    from lockstep.cli import _app  # noqa: PLC0415 (slower)

    _app.main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working folder, whose modules are none of a model's: as where `lockstep` is a script
    main()
