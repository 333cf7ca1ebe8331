"""One round of this node's worker group, through PyTorch's elastic agent."""

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.base import ctrl_c
from lockstep.launch.elastic.failure import Failure, failure_of, oom_kills
from lockstep.launch.elastic.fork_server import SIGNALS, ForkServer
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.stopped_workers import StoppedWorkers
from lockstep.protocol import run_secret
from lockstep.protocol.environment import RUN_ID
from lockstep.protocol.rendezvous import STORE_TIMEOUT
from lockstep.protocol.store_client import StoreClient, connected

EXIT_BARRIER_SECONDS = 1
"""The agents need not wait for each other's exit: the leader waits for all outcomes."""
HAS_GRACE = "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters
"""Before torch 2.13 workers always have 30 s to exit."""


class RoundEnded(Exception):  # noqa: N818 (no error: the leader has ended the round)
    """Raised to end the round; if `is_graceful`, by a signal after which workers save a checkpoint."""

    def __init__(self, reason: str, *, is_graceful: bool) -> None:
        super().__init__(reason)
        self.is_graceful = is_graceful


@dataclass(frozen=True, kw_only=True)
class WorkerGroupStart:
    argv: tuple[str, ...]
    processes: int
    logs: Path
    grace_seconds: int
    fork_server: ForkServer | None
    """Server that forks the workers; None: each is started as a new process."""


class Rendezvous(RendezvousHandler):
    """Gives the agent the members that the leader has published; ends it when the round is over."""

    def __init__(self, membership: Membership, round_end: Callable[[], RoundEnded | None]) -> None:
        self.membership, self.round_end = membership, round_end
        self.store: StoreClient | None = None
        """Store of the round, referenced here since C++ does not keep the Python object."""
        self._other_children = set(psutil.Process().children(recursive=True))

    def get_backend(self) -> str:
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the agents' store, which outlives rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        host, state = self.membership.endpoint.host, self.membership.round
        secret = run_secret.read(Path(os.environ[run_secret.VARIABLE]))
        self.store = connected(host, state.plan["port"], secret, timeout=STORE_TIMEOUT)
        return RendezvousInfo(
            store=PrefixStore("agents", self.store),
            rank=list(state.members).index(self.membership.index),
            world_size=len(state.members),
            bootstrap_store_info=RendezvousStoreInfo(master_addr=host, master_port=state.plan["port"]),
        )

    def num_nodes_waiting(self) -> int:
        """Return 0, or raise RoundEnded; the agent polls this while its workers run."""
        if end := self.round_end():
            if not end.is_graceful:
                kill_children(self._other_children)  # or the agent would send SIGTERM, and wait
            raise end
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: there is only one round."""

    def get_run_id(self) -> str:
        """Return the run's name in logs and in TORCHELASTIC_RUN_ID."""
        return RUN_ID

    def shutdown(self) -> bool:
        """Do nothing: the next round has a store of its own."""
        return True


def run_round(
    start: WorkerGroupStart, membership: Membership, round_end: Callable[[], RoundEnded | None]
) -> Failure | None:
    """Start the workers and wait for their exit -> the first failure, if any.

    Raises RoundEnded, and SignalException when this process received a signal; both once all workers have exited.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=start.processes,
        entrypoint=start.argv[0],
        args=start.argv[1:],
        rdzv_handler=Rendezvous(membership, round_end),
        max_restarts=0,  # the agent would restart after any error, and never on fewer processes
    )
    grace: dict[str, Any] = {"shutdown_timeout": start.grace_seconds} if HAS_GRACE else {}
    agent = Agent(
        start.fork_server,
        StoppedWorkers(membership.section.failure_timeout_seconds),
        spec,
        RankLogs(start.logs),
        exit_barrier_timeout=EXIT_BARRIER_SECONDS,
        **grace,
    )
    kills_before = oom_kills()
    result = agent.run()
    if not result.is_failed():
        return None
    return failure_of(ChildFailedError(spec.get_entrypoint_name(), result.failures), start.logs, kills_before)


class Agent(LocalElasticAgent):
    """PyTorch's agent; workers are forked where they can be, start with SIGINT blocked until they handle it, and are
    killed if they are stopped while others wait for them."""

    def __init__(
        self, fork_server: ForkServer | None, stopped: StoppedWorkers, spec: WorkerSpec, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(spec, *args, **kwargs)
        self.fork_server, self.stopped = fork_server, stopped

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self.fork_server.starts_workers() if self.fork_server else nullcontext(), ctrl_c.blocked():
            return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if worker_group.workers[0].world_size > 1:
            self.stopped.kill(worker.id for worker in worker_group.workers)
        return super()._monitor_workers(worker_group)


class RankLogs(LogsSpecs):
    """logs/rank-N.log for every rank but 0, which keeps the terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return log and error files of each local rank; an empty name leaves the terminal."""
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        paths = {local: str(self.folder / f"rank-{rank}.log") if rank else "" for local, rank in ranks.items()}
        errors = {local: str(self.folder / f".error-{rank}.json") for local, rank in ranks.items()}
        for local, file in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = file
        return LogsDest(paths, paths, {}, {}, errors)  # no tee: its thread would outlive a signal


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise SignalException on signals, as the agent does while it runs."""

    def stop(number: int, _: object) -> NoReturn:
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(SIGNALS)
    before = {name: signal.signal(getattr(signal, name), stop) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def kill_children(keep: set[psutil.Process]) -> None:
    """Kill the descendants of this process, except for `keep`."""
    for child in set(psutil.Process().children(recursive=True)) - keep:
        with suppress(psutil.Error):
            child.kill()
