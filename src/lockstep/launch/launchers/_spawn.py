"""The spawn launcher: processes of this machine, each a new interpreter, without restarts."""

import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from lockstep.base import hash_seed, lifetime
from lockstep.base.contracts import Plan
from lockstep.base.errors import Interrupted
from lockstep.launch.elastic.failure import Failure
from lockstep.launch.elastic.leader import resume_hint, rotate_logs
from lockstep.launch.elastic.output_pipe import OutputPipe
from lockstep.launch.elastic.worker_processes import MachinePlace, WorkerGroupStart, WorkerProcesses
from lockstep.launch.elastic.worker_round import Round, SignalReceived, signals_raised, stopped_limit
from lockstep.launch.launchers._own_process import OwnProcess
from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint, serve_store

PIPED = {"FORCE_COLOR": "", "TTY_COMPATIBLE": "", "PYTHONIOENCODING": "utf-8:backslashreplace", "PYTHONUNBUFFERED": "1"}
"""Variables of workers whose output goes through a pipe: a notebook claims to be a terminal, but a progress bar cannot
be redrawn through one."""


class Spawn(OwnProcess):
    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end -> the exit code: 0, or that of the first process that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        failure = self.failure(plan, logs)
        if failure is None:
            return 0
        if failure.text:
            sys.stderr.write(f"{failure.text}\n{resume_hint(logs)}")
        return failure.exit_code

    def failure(self, plan: Plan, logs: Path, pipes: Mapping[int, OutputPipe] | None = None) -> Failure | None:
        """Run the plan to its end, without output of its own -> the first failure, if any.

        `pipes` take the output of rank 0 (1: stdout, 2: stderr). Raises Interrupted after a signal, once every process
        has ended; LaunchError if a process cannot be started.
        """
        logs.mkdir(parents=True, exist_ok=True)
        rotate_logs(logs)
        secret = run_secret.create(logs)
        start = WorkerGroupStart(
            argv=(*_with_import_path(plan.argv), *lifetime.worker_options()),
            processes=plan.processes,
            logs=logs,
            grace_seconds=self.config.grace_seconds,
            environment={
                **plan.environment,
                hash_seed.VARIABLE: hash_seed.chosen(),
                run_secret.VARIABLE: str(logs.absolute()),
                **(PIPED if 1 in (pipes or {}) else {}),
            },
            own_sessions=threading.current_thread() is threading.main_thread(),  # another handles no signals
            pipes=pipes or {},
        )
        workers = None
        try:
            with signals_raised(), closing(serve_store(Endpoint(host=LOOPBACK, port=0)).open_to(secret)) as store:
                place = MachinePlace(world_size=plan.processes, port=store.port)
                workers = WorkerProcesses(start, place, stopped_limit(self.config, plan.processes))
                return Round(workers).run(lambda: None)
        except SignalReceived as error:
            if workers is not None and workers.num_finished == plan.processes:
                return None
            raise Interrupted(f"ended by {error.number.name}") from None


def _with_import_path(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a worker that imports from where this process does: a script may have changed sys.path."""
    module = argv.index("-m")
    path = [entry for entry in sys.path if isinstance(entry, str)]
    code = f"import runpy, sys; sys.path[:] = {path!r}; runpy.run_module({argv[module + 1]!r}, None, '__main__', True)"
    return (*argv[:module], "-c", code, *argv[module + 2 :])


build = Spawn
