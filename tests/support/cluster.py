"""A real Slurm cluster on this one machine, for tests: a head and some nodes, each a host of its own.

    python cluster.py up [N] | down | status | exec HOST COMMAND... | cut NODE | kill NODE | heal NODE

A host is a set of namespaces (processes, network, hostname, mounts, IPC) with a first process of its own; when that
one is killed, the kernel ends all the others. Hosts share the machine's files, except /proc, /sys, /dev/shm, /run,
/var/log, /etc/slurm and /etc/hosts. Their network leads nowhere else, so that several clusters may use the same
addresses. Needs root and the programs in `NEEDED` (tried: Slurm 22.05 of Debian 12); no systemd, no control groups.
"""

import argparse
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv", "mount")
CLIENTS = ("sbatch", "squeue", "scontrol", "scancel", "srun", "sinfo", "salloc")
HERE = Path(__file__).resolve().parent
SUBNET = "10.66.0"
PATIENCE_SECONDS = 300
"""After which something hangs, however busy the machine is: no outcome may depend on how fast it is."""
_SILENT = {"stdin": subprocess.DEVNULL}
PROGRAMS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STEP_MANAGER = """\
#!{python} -IS
# The manager of a step finds what to signal among its descendants only: have it adopt their orphans.
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
os.execv("{program}", sys.argv)
"""
CLIENT = """\
#!/bin/sh
# Not in the head's process table, so that a signal sent to this process reaches the command itself.
unset HOSTNAME
exec nsenter --target {pid} --mount --uts --ipc --net --wdns="$PWD" -- {client} "$@"
"""


def why_not(kind="Slurm", needed=NEEDED):
    """Why no cluster can be had on this machine; empty if one can."""
    if os.geteuid() != 0:
        return f"a {kind} cluster needs root"
    missing = [name for name in needed if not _program(name)]
    if missing:
        return f"a {kind} cluster needs {', '.join(missing)}: tests/cluster/packages.sh"
    trial = subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"a {kind} cluster needs namespaces: {trial.stderr.strip()}" if trial.returncode else ""


def until(condition, hope):
    """Poll `condition` until it is true -> its value; TimeoutError, naming what was hoped for, only where it hangs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_SECONDS} s: {hope}")
        time.sleep(0.1)
    return value


class Cluster:
    """`with Cluster(folder=..., nodes=2) as cluster:`; everything it starts ends with it, or with its process.

    folder: for state, logs and commands; must be absent, empty or of an earlier cluster; removed on close.
    cpus, gpus: of each node, as declared to Slurm; GPUs are pretended.
    """

    def __init__(self, folder, *, nodes=2, cpus=4, gpus=0):
        self.folder = Path(folder).resolve()
        self.num_nodes, self.cpus, self.gpus = nodes, cpus, gpus
        self.started = {}
        self.keeper = None

    def __enter__(self):
        self.open()
        return self

    def __exit__(self, *_):
        self.close()

    # life

    def open(self, *, kept=True):
        """Start it. `kept`: to be closed when this process ends, also by SIGKILL."""
        if reason := self.why_not():
            raise RuntimeError(reason)
        Cluster(self.folder).close()  # of what an earlier one may have left
        try:
            self._configure()
            if kept:
                keep = [sys.executable, "-IS", __file__, "keep", self.folder]
                self.keeper = self._spawn(keep, stdin=subprocess.PIPE)
            self._boot("head")
            self._begin()
            self.calm()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def why_not():
        """Why none can be had on this machine; empty if one can."""
        return why_not()

    def _begin(self):
        """Wait for the head, whose host runs."""
        self._offer_clients()
        self._await("a controller", lambda: "UP" in self._client("scontrol", "ping").stdout)

    def close(self):
        """End every process and remove the folder; a second call does nothing."""
        if self.keeper:
            self.keeper.stdin.close()
            self.keeper.wait()
            self.keeper = None
        self._end()  # without a keeper, or for what it failed at
        for process in self.started.values():
            process.wait()
        self.started = {}

    def _end(self):
        if not self.folder.is_dir():
            return
        if not self._home("head").is_dir() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} holds something else than a cluster")
        head = self._leader("head")
        strays = _processes_in_network_of(head) if head else []  # clients live in no host's process table
        for host in [*self.nodes, "head"]:
            self._kill_host(host)
        for pid in strays:
            _kill(pid)
        shutil.rmtree(self.folder)

    def _configure(self):
        for host in ["head", *(f"node{i + 1}" for i in range(self.num_nodes))]:
            self._home(host).mkdir(parents=True)
        etc = self.folder / "etc"
        etc.mkdir()
        names = ["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in ["head", *self.nodes])]
        (etc / "hosts").write_text("\n".join(names) + "\n")
        (self.folder / "bin").mkdir()
        self._configure_daemons(etc)

    def _configure_daemons(self, etc):
        key = os.open(etc / "munge.key", os.O_WRONLY | os.O_CREAT, mode=0o600)  # munged trusts no other mode
        os.write(key, os.urandom(128))
        os.close(key)
        # Nothing here uses control groups. Slurm could not be told so before 24.05, but its v1 plugin stays idle.
        version = re.search(r"(\d+)\.(\d+)", subprocess.check_output([_program("slurmctld"), "-V"], text=True))
        plugin = "disabled" if tuple(map(int, version.groups())) >= (24, 5) else "cgroup/v1"
        (etc / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        manager = etc / "slurmstepd"
        manager.write_text(STEP_MANAGER.format(python=sys.executable, program=_program("slurmstepd")))
        manager.chmod(0o755)
        size = f"CPUs={self.cpus} CoresPerSocket={self.cpus} RealMemory=64000"  # without memory, no job may ask for it
        gpus = [f"/etc/slurm/gpu{number}" for number in range(self.gpus)]
        for path in gpus:  # a GPU without a device is not counted: these are other names of /dev/null
            os.mknod(etc / Path(path).name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (etc / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in gpus))
        size += f" Gres=gpu:{self.gpus}\nGresTypes=gpu" if gpus else ""
        settings = (HERE / "slurm.conf").read_text()
        (etc / "slurm.conf").write_text(f"{settings}NodeName=node[1-{self.num_nodes}] {size}\n")

    def _offer_clients(self):
        """Commands that run on the head, for programs that are not on any host."""
        for client in CLIENTS:
            path = self.folder / "bin" / client
            path.write_text(CLIENT.format(pid=self._leader("head"), client=client))
            path.chmod(0o755)

    # hosts

    @property
    def nodes(self):
        """Names of the nodes."""
        names = (path.name for path in (self.folder / "hosts").glob("node*"))
        return sorted(names, key=lambda name: int(name.removeprefix("node")))

    @property
    def environment(self):
        """This process's variables, with the client commands first in PATH: what to start a launcher with."""
        return {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def address(self, host):
        """The IP address of a host, known on the hosts only."""
        return f"{SUBNET}.1" if host == "head" else f"{SUBNET}.{10 + int(host.removeprefix('node'))}"

    def run(self, host, *command, **options):
        """Run a command on a host to its end -> CompletedProcess with text output; `options`: of subprocess.run."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": PATIENCE_SECONDS}
        return subprocess.run(self.inside(host, *command), **({} if "input" in options else _SILENT) | pipes | options)

    def start(self, host, *command, **options):
        """Start a command on a host -> Popen. Any signal sent to it ends the command as SIGKILL would."""
        return subprocess.Popen(self.inside(host, *command), **_SILENT | options)

    def inside(self, host, *command):
        """The command line that runs a command on a host, in the current folder."""
        leader = self._leader(host)
        if leader is None:
            raise ProcessLookupError(f"{host} is not running")
        enter = ["nsenter", "-t", str(leader), "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={os.getcwd()}"]
        return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "env", "-u", "HOSTNAME", *map(str, command)]

    def cut(self, node):
        """Unplug the node's network; its processes live on."""
        self._switch("link", "set", self._known(node), "down")

    def kill(self, node):
        """End every process of the node at once; after `cut`, nobody is told: a loss of power."""
        self._kill_host(self._known(node))

    def heal(self, node):
        """Boot the node if it was killed, and plug it in."""
        self._boot(self._known(node))
        self._switch("link", "set", node, "up")
        self._take_back(node)

    def _take_back(self, node):
        # A node that is down would be looked at within a minute only. Refused, harmlessly, if it is not down.
        self._client("scontrol", "update", f"nodename={node}", "state=resume")

    def _home(self, host):
        return self.folder / "hosts" / host

    def _known(self, node):
        if node not in self.nodes or not self._leader("head"):
            raise ValueError(f"no node {node} in {self.folder}")
        return node

    def _leader(self, host):
        """The pid of a host's first process, as seen from outside; None if it is not running."""
        with suppress(OSError, ValueError):
            pid = int((self._home(host) / "pid").read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[-5:-1] == [word.encode() for word in self._first_process(host)[-4:]]:
                return pid
        return None

    def _first_process(self, host):
        return [sys.executable, "-IS", str(HERE / "host.py"), str(self.folder), host, self.address(host)]

    def _spawn(self, command, **options):
        """Start what outlives a call, with the variables of a machine, not those of a test."""
        return subprocess.Popen(command, **_SILENT | options, env={"PATH": PROGRAMS}, start_new_session=True)

    def _boot(self, host):
        if self._leader(host):
            return
        (self._home(host) / "pid").unlink(missing_ok=True)
        new = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child"]
        with open(self._home(host) / "host.log", "a") as log:
            self.started[host] = self._spawn([*new, *self._first_process(host)], stdout=log, stderr=log)
        leader = self._await(f"{host} running", lambda: self._leader(host))
        if host != "head":
            self._switch("link", "delete", host, check=False)  # may be left by a node killed just now
            self._switch("link", "add", host, "type", "veth", "peer", "name", "eth0", "netns", str(leader))
            self._switch("link", "set", host, "master", "eth0", "up")

    def _kill_host(self, host):
        leader = self._leader(host)
        if leader:
            _kill(leader)
        if host in self.started:
            self.started.pop(host).wait()

    def _switch(self, *words, check=True):
        """An ip command among the ports of the head's bridge, which is what joins the hosts."""
        enter = ["nsenter", "-t", str(self._leader("head")), "--net", _program("ip"), *words]
        done = subprocess.run(enter, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"ip {' '.join(words)}: {done.stderr}")

    def _await(self, what, condition):
        try:
            return until(condition, what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    # jobs

    def _client(self, *command, **options):
        name, *arguments = map(str, command)
        pipes = {"capture_output": True, "text": True, "timeout": PATIENCE_SECONDS}
        return subprocess.run([self.folder / "bin" / name, *arguments], **_SILENT | pipes | options)

    def submit(self, *arguments, **options):
        """`sbatch` with these arguments -> the job's id; `options`: of subprocess.run, such as cwd and env."""
        done = self._client("sbatch", "--parsable", *arguments, **options)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip().partition(";")[0]

    def state(self, job):
        """Slurm's word for the state of a job, such as RUNNING; empty for a job that it does not know (any more)."""
        return self._client("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def wait_for(self, job, states):
        """Wait until a job is in one of `states` (a name or several) -> the one it is in."""
        wanted = {states} if isinstance(states, str) else set(states)
        try:
            return until(lambda: wanted & {self.state(job)}, f"job {job} {' or '.join(wanted)}").pop()
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self._client('scontrol', 'show', 'job', job).stdout}") from None

    def node_state(self, node):
        """Slurm's word for the state of a node, such as idle; with a star, it does not answer."""
        return self._client("sinfo", "-h", "-p", "batch", "-n", node, "-o", "%T").stdout.strip()

    def wait_for_node(self, node, states):
        """Wait until a node is in one of `states` (a name or several) -> the one it is in."""
        wanted = {states} if isinstance(states, str) else set(states)
        return until(lambda: wanted & {self.node_state(node)}, f"{node} {' or '.join(wanted)}").pop()

    def calm(self):
        """Cancel every job, heal every node, and wait until all is idle: between two tests."""
        self._client("scancel", "--user=root")
        for node in self.nodes:
            self.heal(node)
        self._await("idle nodes", lambda: all(self.node_state(node) == "idle" for node in self.nodes))

    # diagnosis

    def logs(self, lines=40):
        """The last lines of every log of every host."""
        tails = []
        for path in sorted((self.folder / "hosts").glob("*/*.log")):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"== {path.parent.name}/{path.name}", *text]))
        return "\n".join(tails)

    def status(self):
        """Hosts, nodes and jobs, to be read by a person; empty if the cluster is down."""
        if not self._leader("head"):
            return ""
        hosts = [f"{host} {self.address(host)} pid {self._leader(host)}" for host in ["head", *self.nodes]]
        listing = [self._client("sinfo", "-N", "-p", "batch").stdout, self._client("squeue").stdout]
        return "\n".join([*hosts, *listing])


def _program(name):
    return shutil.which(name, path=PROGRAMS)


def _kill(pid):
    """Kill a process and wait until it and, if it was the first of a host, all others there have ended."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], 30)
        os.close(process)


def _processes_in_network_of(pid):
    network = os.readlink(f"/proc/{pid}/ns/net")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(path / "ns/net") == network:
                found.append(int(path.name))
    return [each for each in found if each != os.getpid()]


def keep(cluster):
    """Wait until the process that started the cluster has ended, or has closed the pipe, and close the cluster."""
    sys.stdin.read()
    cluster.close()


def obey(cluster, verb, words):
    match verb:
        case "up" if cluster.status():
            raise ValueError(f"{cluster.folder} is up already")
        case "up":
            cluster.open(kept=False)
            print(f"for sbatch and the like: export PATH={cluster.folder / 'bin'}:$PATH")  # noqa: T201
        case "status":
            print(cluster.status() or "down")  # noqa: T201
        case "exec":
            command = cluster.inside(*words)
            os.execvp(command[0], command)
        case _:
            {"down": cluster.close, "cut": cluster.cut, "kill": cluster.kill, "heal": cluster.heal}[verb](*words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp/lockstep-cluster", help="state, logs, and commands in bin/")
    parser.add_argument("--cpus", type=int, default=4, help="of each node")
    parser.add_argument("--gpus", type=int, default=0, help="of each node, pretended")
    parser.add_argument("verb", choices=("up", "down", "status", "exec", "cut", "kill", "heal"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    nodes = int(given.words[0]) if given.verb == "up" and given.words else 2
    cluster = Cluster(given.folder, nodes=nodes, cpus=given.cpus, gpus=given.gpus)
    try:
        obey(cluster, given.verb, given.words)
    except (RuntimeError, ValueError, ProcessLookupError, TimeoutError) as error:
        parser.exit(1, f"cluster.py: {error}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["keep"]:  # see Cluster.open
        keep(Cluster(sys.argv[2]))
    else:
        main()
