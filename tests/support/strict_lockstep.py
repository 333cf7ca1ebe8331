"""`lockstep`, whose processes fail where they would unpickle what another process sends: `python strict_lockstep.py
train c.yaml ...`. Workers are forked from this process, and so have its change."""

import sys
import threading

from torch.distributed import distributed_c10d

from lockstep.cli import _app


def refuse(*_, **__):
    raise AssertionError("something was unpickled")


if __name__ == "__main__":
    distributed_c10d._tensor_to_object = refuse
    assert threading.active_count() == 1
    _app.app(sys.argv[1:])
