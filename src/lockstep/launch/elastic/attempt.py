"""One start of this machine's processes, through PyTorch's elastic agent, to their end."""

import inspect
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.base import ctrl_c
from lockstep.launch.elastic.failure import Failure, failure_of, oom_kills
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.rendezvous import STORE_TIMEOUT

SIGNALS = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1") if hasattr(signal, name)]
EXIT_BARRIER_SECONDS = 1
"""The agents need not wait for each other's end: the meeting does."""
HAS_GRACE = "shutdown_timeout" in inspect.signature(LocalElasticAgent).parameters
"""Before torch 2.13 processes always have 30 s to end."""


class RoundEnded(Exception):  # noqa: N818 (no error: node 0 has ended the attempt)
    """This attempt is to be ended; `kindly`: by a signal after which the processes save."""

    def __init__(self, why: str, *, kindly: bool) -> None:
        super().__init__(why)
        self.kindly = kindly


@dataclass(frozen=True, kw_only=True)
class ProcessStart:
    argv: tuple[str, ...]
    processes: int
    logs: Path
    grace_seconds: int


class Rendezvous(RendezvousHandler):
    """Tells the agent what the meeting has agreed on; ends it when an attempt is over."""

    def __init__(self, meeting: Membership, is_over: Callable[[], RoundEnded | None]) -> None:
        self.meeting, self.is_over = meeting, is_over
        self._others = set(psutil.Process().children())

    def get_backend(self) -> str:
        return "lockstep"

    @property
    def use_agent_store(self) -> bool:
        """The processes use the store that the agents use: it outlives rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Who takes part, as node 0 has said."""
        host, word = self.meeting.endpoint.host, self.meeting.word
        store = TCPStore(host, word.plan["port"], timeout=STORE_TIMEOUT)
        return RendezvousInfo(
            store=PrefixStore("agents", store),
            rank=list(word.members).index(self.meeting.index),
            world_size=len(word.members),
            bootstrap_store_info=RendezvousStoreInfo(master_addr=host, master_port=word.plan["port"]),
        )

    def num_nodes_waiting(self) -> int:
        """The agent asks this while its processes run. Raises Over."""
        if over := self.is_over():
            if not over.kindly:
                end_all_but(self._others)  # or the agent would ask them to end, and wait
            raise over
        return 0

    def is_closed(self) -> bool:
        """Never: it has one round."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def get_run_id(self) -> str:
        """Its name, in logs and in TORCHELASTIC_RUN_ID."""
        return "lockstep"

    def shutdown(self) -> bool:
        """Nothing to do: the next attempt has a store of its own."""
        return True


def attempt(start: ProcessStart, meeting: Membership, is_over: Callable[[], RoundEnded | None]) -> Failure | None:
    """Start the processes and wait for their end -> the first that failed, if any.

    Raises Over, and SignalException when this process got a signal; both once all processes have ended.
    """
    spec = WorkerSpec(
        role="default",
        local_world_size=start.processes,
        entrypoint=start.argv[0],
        args=start.argv[1:],
        rdzv_handler=Rendezvous(meeting, is_over),
        max_restarts=0,  # the agent would start again after any error, and never on fewer processes
    )
    grace: dict[str, Any] = {"shutdown_timeout": start.grace_seconds} if HAS_GRACE else {}
    agent = Agent(
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
    """PyTorch's, whose processes keep Ctrl-C back until they can answer it."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with ctrl_c.blocked():
            return super()._start_workers(worker_group)


class RankLogs(LogsSpecs):
    """logs/rank-N.log for every rank but 0, which keeps the terminal."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for each local rank; an empty name leaves the terminal."""
        ranks = {local: int(env["RANK"]) for local, env in envs.items()}
        paths = {local: str(self.folder / f"rank-{rank}.log") if rank else "" for local, rank in ranks.items()}
        errors = {local: str(self.folder / f".error-{rank}.json") for local, rank in ranks.items()}
        for local, file in errors.items():
            envs[local]["TORCHELASTIC_ERROR_FILE"] = file
        return LogsDest(paths, paths, {}, {}, errors)  # nothing to be followed: a thread that does so outlives a signal


@contextmanager
def signals_raised() -> Iterator[None]:
    """Have signals raise SignalException here, as the agent does while it runs."""

    def stop(number: int, _: object) -> NoReturn:
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(SIGNALS)
    before = {name: signal.signal(getattr(signal, name), stop) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def end_all_but(others: set[psutil.Process]) -> None:
    """Kill the children of this process, but for these."""
    for left in set(psutil.Process().children()) - others:
        with suppress(psutil.Error):
            left.kill()
