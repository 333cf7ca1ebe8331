"""The entrypoint of a run's Ray job: takes machines of the cluster, and starts a launcher on each of them.

python -m lockstep.launch.ray_driver SETTINGS WORDS ... runs `lockstep WORDS ... --rendezvous HOST:PORT --node-rank N`
on each. SETTINGS is JSON: {"launch", "cpus", and "output", the log of all, or "folder", where to run}.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.base import storage
from lockstep.base.errors import Interrupted, LaunchError, LockstepError, PeerLost
from lockstep.launch.launchers.ray import SENT, Config, reason_of

POLL_SECONDS = 0.5
QUIET_SECONDS = 3.0
"""Seconds of waiting for machines after which a line reports it."""
REPLACE_SECONDS = 20.0
"""How much later than a loss another launcher starts: until the others have noticed it, and one of them leads."""
AGAIN = (None, Interrupted.exit_code, PeerLost.exit_code)
"""Exit codes after which the run starts again; None: the machine that decides is lost."""
LAUNCHER = """
import sys
from lockstep.base.lifetime import end_with_parent
end_with_parent("SIGTERM", int(sys.argv.pop(1)))
from lockstep.__main__ import main
main()
"""
"""Program of a launcher, which saves and ends when the Ray process that started it ends."""


class Machine:
    """A launcher on one machine of the cluster; a Ray actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_stopped = False

    def where(self) -> tuple[str, int]:
        """Return this machine's address, and a port that is free."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def run(self, words: Sequence[str], output: str, folder: str) -> tuple[int, str]:
        """Run a launcher to its end -> its exit code and its output (empty if appended to the file `output`)."""
        if output:
            _store_code(Path(output).parents[1] / SENT)
        command = [sys.executable, "-P", "-c", LAUNCHER, str(os.getpid()), *words]
        log = open(output, "ab") if output else subprocess.PIPE  # noqa: SIM115 (the launcher's)
        how: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
        self.process = subprocess.Popen(command, cwd=folder or None, stdout=log, **how)
        if self.is_stopped:
            self.stop()
        said, _ = self.process.communicate()
        return self.process.returncode, (said or b"").decode(errors="replace")

    def stop(self) -> None:
        """Have the launcher save and end."""
        self.is_stopped = True
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def _store_code(sent: Path) -> None:
    """Store the user's code that came with the job in the run's folder, where the config says that it is."""
    for file in [each for each in Path("code").rglob("*") if each.is_file()]:
        place, content = sent / file, file.read_bytes()
        if not (place.is_file() and place.read_bytes() == content):
            place.parent.mkdir(parents=True, exist_ok=True)
            storage.write(place, content)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A launcher, on the machine on which Ray has placed its bundle of resources."""

    index: int
    rank: int
    machine: Any
    due: float
    """Earliest time of its start (monotonic seconds)."""


class RayDriver:
    """Keeps a launcher on every machine that Ray gives, until the run is over."""

    def __init__(self, settings: Mapping[str, Any], words: Sequence[str]) -> None:
        self.section, self.words = Config.model_validate(settings["launch"]), tuple(words)
        self.output, self.folder = str(settings.get("output", "")), str(settings.get("folder", ""))
        self.needed: dict[str, float] = {"CPU": settings["cpus"], **self.section.resources}
        if self.section.gpus:
            self.needed["GPU"] = self.section.gpus
        self.is_stopped = False
        self.shown = 0
        """Bytes of the log that were copied into that of the job."""
        self.coming: dict[Any, Bundle] = {}
        """Answer to `where` -> a launcher that has not started."""
        self.running: dict[Any, Bundle] = {}
        """Answer to `run` -> a launcher."""
        self.endpoint, self.next_rank = "", self.section.max_nodes

    def run(self) -> int:
        """Run to the end -> exit code. Raises LaunchError."""
        for name in ("SIGTERM", "SIGINT"):
            signal.signal(getattr(signal, name), self._stop)
        code = self._run_once()
        for _ in range(self.section.restarts):
            if self.is_stopped or code not in AGAIN:
                break
            self.say("the run starts again from its newest checkpoint, once Ray has machines for it")
            code = self._run_once()
        return Interrupted.exit_code if self.is_stopped else PeerLost.exit_code if code is None else code

    def _stop(self, *_: object) -> None:
        self.is_stopped = True

    def say(self, text: str) -> None:
        if self.output:
            with open(self.output, "a") as log:
                log.write(f"{text}\n")
            self._show()
        else:
            sys.stdout.write(f"{text}\n")

    def _show(self) -> None:
        """Copy what is new in the log to that of the job, which Ray's own commands and its dashboard show."""
        with suppress(OSError), open(self.output, "rb") as log:
            log.seek(self.shown)
            self.shown += sys.stdout.buffer.write(log.read())
            sys.stdout.flush()

    # ---- machines

    def _take(self) -> PlacementGroup:
        """Wait for a bundle of each machine: of MIN:MAX, of as many as are large enough. Raises LaunchError."""
        section, began, is_said = self.section, time.monotonic(), False
        number = min(max(self._fitting(), section.min_nodes), section.max_nodes)
        group = placement_group([self.needed] * number, strategy=section.placement)
        each = " and ".join(f"{value:g} {name}" for name, value in self.needed.items())
        wanted = f"{number} machine{'s' if number > 1 else ''} with {each}"
        while not (self.is_stopped or group.wait(1)):
            waited, fitting = time.monotonic() - began, self._fitting()
            is_there = fitting >= number or (fitting and section.placement != "STRICT_SPREAD")
            if waited > QUIET_SECONDS and not is_said:
                why = "others use them" if is_there else f"the cluster has {fitting}; an autoscaler may add more"
                self.say(f"waiting for {wanted}: {why}")
                is_said = True
            if waited > section.join_timeout_seconds and not is_there:
                raise LaunchError(
                    f"the Ray cluster has {fitting} of {wanted}, and got no more within {waited:.0f} s "
                    "(launch.join_timeout_seconds): lower launch.cpus, gpus, resources or nodes"
                )
        return group

    def _fitting(self) -> int:
        """Count the machines of the cluster that are large enough."""
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return sum(all(has.get(name, 0) >= value for name, value in self.needed.items()) for has in alive)

    def _request(self, group: PlacementGroup, index: int, *, rank: int, delay: float = 0.0) -> None:
        """Request a process in a bundle, which Ray starts as soon as the bundle is on a machine."""
        options: dict[str, Any] = {
            "num_cpus": self.needed["CPU"],
            "num_gpus": self.needed.get("GPU", 0),
            "max_concurrency": 2,
        }
        if self.section.python != "python":
            options["runtime_env"] = {"py_executable": self.section.python}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        machine: Any = ray.remote(Machine).options(scheduling_strategy=strategy, **options).remote()
        bundle = Bundle(index=index, rank=rank, machine=machine, due=time.monotonic() + delay)
        self.coming[machine.where.remote()] = bundle

    # ---- launchers

    def _run_once(self) -> int | None:
        """Run a launcher on every machine until all have ended -> the run's exit code; None: it is lost."""
        group, self.endpoint, codes, told = self._take(), "", dict[int, int](), set[Any]()
        for index in range(group.bundle_count):
            self._request(group, index, rank=index)
        while self.running or not (self.endpoint or self.is_stopped):
            now = time.monotonic()
            due = [ref for ref, each in self.coming.items() if now >= each.due and (self.endpoint or not each.rank)]
            for ref in ray.wait([*self.running, *due], timeout=POLL_SECONDS)[0]:
                (self._note_end if ref in self.running else self._start)(ref, group, codes)
            if self.is_stopped:
                for ref in self.running.keys() - told:
                    self.running[ref].machine.stop.remote()
                told |= self.running.keys()
            self._show()
        remove_placement_group(group)  # with what has not started
        self.coming = {}
        return min(codes.values(), default=None) if self.section.recovers_live else codes.get(0)

    def _start(self, ready: Any, group: PlacementGroup, _: object) -> None:
        """Start the launcher on a machine that is there. Raises LaunchError."""
        bundle = self.coming.pop(ready)
        try:
            address, port = ray.get(ready)
        except RayActorError as error:
            if "No module named" in str(error):
                raise LaunchError(reason_of(str(error))) from None
            self._request(group, bundle.index, rank=bundle.rank)  # since it was lost at once
        except RayError as error:
            raise LaunchError(reason_of(str(error))) from None
        else:
            self.endpoint = self.endpoint or f"{address}:{port}"
            place = ("--rendezvous", self.endpoint, "--node-rank", str(bundle.rank))
            self.running[bundle.machine.run.remote((*self.words, *place), self.output, self.folder)] = bundle

    def _note_end(self, ended: Any, group: PlacementGroup, codes: dict[int, int]) -> None:
        """Note the exit code of a launcher; where it was lost, have another one take its place. Raises LaunchError."""
        bundle, section, code = self.running.pop(ended), self.section, -1
        try:
            code, said = ray.get(ended)
            sys.stdout.write(said)
        except RayTaskError as error:
            raise LaunchError(reason_of(str(error))) from None
        except RayError:  # its machine is lost, or its process of Ray
            pass
        if code >= 0:
            codes[bundle.rank] = code
        elif section.recovers_live or (bundle.rank and section.min_nodes < section.max_nodes):
            self.say(f"the machine of node {bundle.rank} is lost: another one takes its place once Ray has it")
            ray.kill(bundle.machine)
            rank = self.next_rank if section.recovers_live else bundle.rank  # of two with one rank, the first is lost
            self.next_rank += 1
            self._request(group, bundle.index, rank=rank, delay=REPLACE_SECONDS)
        else:
            self.say(f"the machine of node {bundle.rank} is lost")


def _connect(output: str) -> None:
    """Connect to the cluster that this job runs in. Raises LaunchError."""
    try:
        if output:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    except OSError as error:
        raise LaunchError(f"{error}: the folder of runs (run.dir) has to be one that all machines share") from None
    except RuntimeError as error:
        raise LaunchError(" ".join(str(error).split())) from None


def main(argv: Sequence[str]) -> int:
    """Run the driver -> exit code."""
    driver = RayDriver(json.loads(argv[0]), argv[1:])
    try:
        _connect(driver.output)
        return driver.run()
    except LockstepError as error:
        with suppress(OSError):
            driver.say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
