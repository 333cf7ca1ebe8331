"""The life of one host of a test cluster, as the first process in its new namespaces: host.py FOLDER NAME ADDRESS."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MUNGE_SOCKET = Path("/run/munge/munge.socket.2")


def run(*words):
    subprocess.run(words, check=True)


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"no {path}")  # and with the first process, the host: nobody may be there to end it
        time.sleep(0.02)


def hide_what_is_not_shared(folder, home):
    """Everything else is the machine's, as if from the file system of a real cluster."""
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "sysfs", "sysfs", "/sys")  # shows this host's network only
    # Whoever has the client commands in PATH, as jobs have, is to find the real ones here: bin/ becomes empty.
    for place in ("/dev/shm", "/run", folder / "bin"):
        run("mount", "-t", "tmpfs", "tmpfs", place)
    run("mount", "--bind", home, "/var/log")
    if not (folder / "etc/daemon").exists():
        run("mount", "--bind", folder / "etc", "/etc/slurm")
    run("mount", "--bind", folder / "etc/hosts", "/etc/hosts")


def join_network(name, address):
    socket.sethostname(name)
    run("ip", "link", "set", "lo", "up")
    if name == "head":
        run("ip", "link", "add", "eth0", "type", "bridge")
    wait_for(Path("/sys/class/net/eth0"))  # a node's is plugged in from outside
    run("ip", "address", "add", f"{address}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")


def start_daemons(name, folder, address):
    if (daemon := folder / "etc/daemon").exists():
        subprocess.Popen([daemon, name, address])
        return
    for own in ("munge", "slurmctld", "slurmd"):
        Path("/run", own).mkdir(mode=0o755)
    key = folder / "etc/munge.key"
    subprocess.Popen(["munged", "--foreground", f"--key-file={key}", "--seed-file=/run/munge/seed"])
    wait_for(MUNGE_SOCKET)
    if name == "head":
        subprocess.Popen(["slurmctld", "-D"])
    else:  # -b: the controller is to know that this was a boot, though the machine's clock of boots does not say so
        subprocess.Popen(["slurmd", "-D", "-b", "-d", "/etc/slurm/slurmstepd"])


def main(folder, name, address):
    home = folder / "hosts" / name
    (home / "pid").write_text(os.readlink("/proc/self"))  # as known outside: /proc is still the machine's
    hide_what_is_not_shared(folder, home)
    join_network(name, address)
    start_daemons(name, folder, address)
    with suppress(ChildProcessError):
        while True:
            os.wait()  # also for orphans, which come to the first process


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
