"""Several machines, as network namespaces, that train together with launch.recovery=live."""

import time
from contextlib import contextmanager, suppress

import psutil
import pytest
import warm
from chaos import DIGITS
from networks import can_make_namespaces, namespaces
from running import family

PORT = 29434
SHORT = DIGITS.replace("steps: 2000", "steps: 500")
LIVE = ["launch.recovery=live", "launch.processes=1", "run.name=live"]
NODES = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")


class Machines:
    """Those that train together in a folder."""

    def __init__(self, folder, places):
        self.folder, self.places = folder, places
        self.outputs, self.started = [], []
        self.run = folder / "runs" / "live"
        (folder / "c.yaml").write_text(SHORT)

    def start(self, number, *settings, node_rank=None):
        output = self.folder / f"{len(self.outputs)}.out"
        self.outputs.append(output)
        words = ["lockstep", "train", "c.yaml", *LIVE, f"launch.nodes={len(self.places)}"]
        words += ["--node-rank", str(number if node_rank is None else node_rank)]
        words += ["--rendezvous", f"{self.places[0].environment['MASTER_ADDR']}:{PORT}"]
        with output.open("w") as file:
            command = [*self.places[number].prefix, *words]
            self.started.append(warm.Popen([*command, *settings], cwd=self.folder, stdout=file, stderr=file))
        return self.started[-1]

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text()
            time.sleep(0.05)

    def wait_for_size(self, size, times=1):
        """Until the run has gone on with so many processes so often."""
        history = self.run / "history.jsonl"
        self.wait(lambda: history.read_text().count(f"{size} processes now" if size > 1 else "1 process now") >= times)

    def text(self):
        return "\n----\n".join(output.read_text() for output in self.outputs)


def kill(process):
    for each in family(process):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def terminate(process):
    """As Slurm does: a signal to all processes."""
    for each in family(process):
        with suppress(psutil.NoSuchProcess):
            each.terminate()


@contextmanager
def made(folder, number):
    """Machines that train in a folder."""
    with namespaces(machines=number, ranks_each=1) as places:
        machines = Machines(folder, places)
        yield machines
        for process in machines.started:
            if process.poll() is None:
                kill(process)
