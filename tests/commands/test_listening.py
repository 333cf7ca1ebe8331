"""What listens while a command runs on one machine: nothing that another machine could reach, unless it was asked for."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import ip_address

import psutil
import pytest
import warm

CONFIG = """
run: {dir: runs, name: one}
data: {kind: digits, limit: 64}
train: {steps: 4, global_batch: 32, micro_batch: 8}
checkpoint: {every_steps: 4}
observe: {sinks: []}
launch: {processes: 2}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "c.yaml").write_text(CONFIG)
    for row in ("a.png", "b.png"):
        from PIL import Image

        Image.new("L", (8, 8), 3).save(folder / row)
    addresses, output = listening(["train", "c.yaml"], folder)
    assert (folder / "runs/one/summary.json").is_file(), output
    return folder, addresses


def listening(words, folder, *, until=None, under=()):
    """Run a command to its end, or until `until` says so -> the addresses that it and its processes listened on, and
    what it said."""
    log = folder / "said.log"
    with log.open("wb") as out:
        files = {"cwd": folder, "stdout": out, "stderr": out}
        if under:
            process = subprocess.Popen([*under, sys.executable, "-m", "lockstep", *words], **files)
        else:
            process = warm.Popen(["lockstep", *words], **files)
    found, top = set(), psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):
            for each in [top, *top.children(recursive=True)]:
                with suppress(psutil.Error):
                    found |= {c.laddr.ip for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        if until and until(log.read_text(errors="replace")):
            process.send_signal(signal.SIGTERM)
            until = None
        time.sleep(0.05)
    return found, log.read_text(errors="replace")


def all_loopback(addresses):
    return all(ip_address(address).is_loopback for address in addresses)


def test_training_with_an_agent(trained):
    assert trained[1] and all_loopback(trained[1]), trained[1]


def test_training_with_spawned_processes(trained):
    found, said = listening(["train", "c.yaml", "launch.kind=spawn", "run.name=two"], trained[0])
    assert found and all_loopback(found), (found, said)


def test_evaluating(trained):
    found, said = listening(["evaluate", "runs/one"], trained[0])
    assert found and all_loopback(found) and "accuracy" in said, (found, said)


def test_predicting(trained):
    found, said = listening(["predict", "runs/one", ".", "--out", "p.csv", "--processes", "1"], trained[0])
    assert all_loopback(found) and "rows written" in said, (found, said)


def test_proving(trained):
    found, said = listening(["prove", "c.yaml", "--steps", "4", "--only", "repeat"], trained[0])
    assert found and all_loopback(found), (found, said)


def test_serving(trained):
    found, said = listening(["serve", "runs/one", "--port", "0"], trained[0], until=lambda said: "http://" in said)
    assert found and all_loopback(found), (found, said)


def test_a_group_of_one_machine_takes_no_other_interface(tmp_path):
    """Gloo listens where the machine's name leads to, which here may be anywhere: the variable decides."""
    script = (
        "import json, os, torch\n"
        "from lockstep.core.distributed import process_group\n"
        "from lockstep.base.world import World\n"
        "for given in ({}, {'GLOO_SOCKET_IFNAME': LOOPBACK}):\n"
        "    os.environ.update(given)\n"
        "    with process_group.opened(World(), torch.device('cpu')):\n"
        "        print(json.dumps(os.environ.get('GLOO_SOCKET_IFNAME')))\n"
        "    print(json.dumps(os.environ.get('GLOO_SOCKET_IFNAME')))\n"
    ).replace("LOOPBACK", repr(loopback()))
    plain = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=plain, capture_output=True, text=True, timeout=60, check=True
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [loopback(), None, loopback(), loopback()]


def test_a_machine_whose_name_leads_to_its_network(trained, tmp_path):
    """Gloo would listen there. In a namespace of its own the machine gets another name, and another file of names."""
    own = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    outside = next((address for address in own if not ip_address(address).is_loopback), None)
    if os.geteuid() or not outside or not shutil.which("unshare"):
        pytest.skip("network namespaces need root and iproute2")
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{outside} elsewhere\n")
    inside = f'hostname elsewhere && mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    found, said = listening(
        ["train", "c.yaml", "run.name=three"],
        trained[0],
        under=["unshare", "--uts", "--mount", "sh", "-c", inside, "-"],
    )
    assert found and all_loopback(found), (found, said)
    assert (trained[0] / "runs/three/summary.json").is_file(), said


def loopback():
    return next(name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))
