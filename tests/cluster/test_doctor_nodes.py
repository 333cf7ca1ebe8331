"""`lockstep doctor` on several machines: what stands between them is named on each of them."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch
import warm
from networks import can_make_namespaces, namespaces

from lockstep.base.lifetime import end_family

DOCTOR = ["lockstep", "doctor", "c.yaml", "launch.nodes=2"]
WORDS = ["launch.processes=1", "launch.join_timeout_seconds=30"]
NODES = pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")


@pytest.fixture
def top(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\n")
    return tmp_path


def examined(top, free_port, *nodes, prefixes=((), ()), host="127.0.0.1"):
    """Give the command on each machine: (further words, variables) of each -> exit codes, texts."""
    with ExitStack() as stack:
        started = []
        for rank, (words, variables) in enumerate(nodes):
            command = [*DOCTOR, *WORDS, *words, "--rendezvous", f"{host}:{free_port}", "--node-rank", str(rank)]
            out = stack.enter_context((top / f"{rank}.out").open("w"))
            is_new = "taskset" in prefixes[rank] or variables  # which a new interpreter reads
            new, interpreter = (subprocess.Popen, [sys.executable, "-m"]) if is_new else (warm.Popen, [])
            process = new(
                [*prefixes[rank], *interpreter, *command],
                cwd=top,
                env=os.environ | variables,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            stack.callback(end_family, process, grace_seconds=5)
            started.append(process)
        codes = [process.wait(150) for process in started]
    return codes, [(top / f"{rank}.out").read_text() for rank in range(len(nodes))]


def found(text):
    """Codes, less that of a machine that is busy or slow while tests run."""
    return set(re.findall(r"^(LS-[A-Z]+-\d+)", text, re.MULTILINE)) - {"LS-CPU-03", "LS-RANK-03", "LS-RUN-03"}


def test_node_0_shows_what_was_found_on_all(top, free_port):
    """Of a healthy pair nothing; of a setting on node 1, that; nothing stays in the folder of runs."""
    codes, (first, second) = examined(top, free_port, ([], {}), ([], {"NCCL_P2P_DISABLE": "1"}))
    assert codes == [0, 0], first + second
    assert (found(first), found(second)) == ({"LS-GPU-02"}, set())
    assert re.search(r"^ 0 +1 +\d+ us +\d+ MB/s", first, re.MULTILINE), first
    assert list((top / "runs").iterdir()) == []


def test_another_version(top, free_port):
    info = top / "older" / "lockstep_train-0.0.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-train\nVersion: 0.0.9\n")
    codes, texts = examined(top, free_port, ([], {}), ([], {"PYTHONPATH": str(info.parent)}))
    assert codes == [1, 1]
    assert [found(text) for text in texts] == [{"LS-NODE-02"}] * 2, texts


def test_a_folder_that_is_not_shared(top, free_port):
    words = ["launch.join_timeout_seconds=6"]
    codes, texts = examined(top, free_port, (words, {}), ([*words, f"run.dir={top / 'elsewhere'}"], {}))
    assert codes == [1, 1]
    assert [found(text) for text in texts] == [{"LS-NODE-03"}] * 2, texts


def test_a_machine_that_does_not_come_and_a_rendezvous_that_cannot_be(top, free_port):
    words = ["launch.join_timeout_seconds=2"]
    codes, texts = examined(top, free_port, (words, {}))
    assert (codes, found(texts[0])) == ([1], {"LS-NODE-01"}), texts
    codes, texts = examined(top, free_port, (words, {}), host="192.0.2.7")
    assert (codes, found(texts[0])) == ([1], {"LS-NODE-04"}), texts


@pytest.mark.skipif(not shutil.which("taskset"), reason="needs taskset")
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL, whose slow products stand for a slow CPU")
def test_a_slow_rank(top, free_port):
    """Node 1 computes with the instructions of an old processor; both share a core, so load slows them down alike."""
    pinned = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    nodes = ([], {}), ([], {"MKL_CBWR": "COMPATIBLE"})
    codes, texts = examined(top, free_port, *nodes, prefixes=(pinned, pinned))
    assert codes == [0, 0], texts
    assert re.findall(r"LS-RANK-03 warning: rank (\d)", texts[0]) == ["1"], texts[0]


@pytest.mark.matrix
@NODES
def test_links_between_machines(top, free_port):
    """A link that is cut down to 50 MB/s, of three; an interface by which the others cannot be reached."""
    with namespaces(machines=3, ranks_each=1) as places:
        prefixes, host = [place.prefix for place in places], places[0].environment["MASTER_ADDR"]
        slow = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            "80mbit",
            "burst",
            "256kb",
            "latency",
            "9ms",
        ]
        subprocess.run([*prefixes[2], *slow], check=True)
        nodes = [(["launch.nodes=3"], {})] * 3
        codes, texts = examined(top, free_port, *nodes, prefixes=prefixes, host=host)
        assert codes == [0, 0, 0], texts
        slow_pairs = re.findall(r"LS-NET-04 warning: rank (\d) sends \d+ MB/s to rank (\d)", texts[0])
        assert sorted(slow_pairs) == [("2", "0"), ("2", "1")], texts[0]
    with namespaces(machines=2, ranks_each=1) as places:
        prefixes, host = [place.prefix for place in places], places[0].environment["MASTER_ADDR"]
        nodes = [(["launch.interface=lo"], {})] * 2
        codes, texts = examined(top, free_port, *nodes, prefixes=prefixes, host=host)
        assert codes == [1, 1], texts
        assert "LS-RANK-01" in found(texts[0]), texts[0]
        assert "through the network interface lo (" in texts[0] and "(LS-NET-05)" in texts[0], texts[0]
        assert "Traceback" not in texts[0]
