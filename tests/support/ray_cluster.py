"""A real Ray cluster on this one machine, for tests: a head without cores and some nodes, each a host of its own."""

import json
import sys

from cluster import Cluster, why_not

NEEDED = ("ip", "nsenter", "unshare", "setpriv", "mount")
GET = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[2], method=sys.argv[1])).read().decode())"
DAEMON = """\
#!/bin/sh
# A node of Ray; every host has a /tmp/ray of its own. A lost node is noticed in seconds, not in a minute.
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=3000 RAY_health_check_failure_threshold=3
export RAY_gcs_rpc_server_reconnect_timeout_s=30 RAY_memory_monitor_refresh_ms=0 RAY_prestart_worker_first_driver=0 PYTHONDONTWRITEBYTECODE=1
export HOME=/root OMP_NUM_THREADS=1
case $1 in
head) set -- --head --port=6379 --dashboard-host=0.0.0.0 --num-cpus=0 "--node-ip-address=$2" ;;
*) set -- --address={head}:6379 --num-cpus={cpus} "--node-ip-address=$2" ;;
esac
{python} -P -m ray.scripts.scripts start --block --object-store-memory=80000000 --disable-usage-stats "$@"
exec sleep infinity  # a machine that has left the cluster goes on
"""


class RayCluster(Cluster):
    """`with RayCluster(folder=..., nodes=3) as cluster:`, as a Cluster of Slurm."""

    @staticmethod
    def why_not():
        return why_not("Ray", NEEDED)

    def _configure_daemons(self, etc):
        daemon = etc / "daemon"
        daemon.write_text(DAEMON.format(head=self.address("head"), cpus=self.cpus, python=sys.executable))
        daemon.chmod(0o755)

    def _begin(self):
        self._await("the Jobs API", lambda: self.run("head", *self._asking("GET", "/api/version")).returncode == 0)

    def _take_back(self, node):
        """A node that starts joins by itself."""

    def _asking(self, method, path):
        return [sys.executable, "-IS", "-c", GET, method, f"{self.url}{path}"]

    @property
    def url(self):
        """The address of the Jobs API, on the hosts."""
        return f"http://{self.address('head')}:8265"

    def ask(self, path, method="GET"):
        """The head's answer, from JSON."""
        return json.loads(self.run("head", *self._asking(method, path), check=True).stdout)

    def jobs(self):
        """Jobs by their submission id."""
        return {job["submission_id"]: job for job in self.ask("/api/jobs/") if job["submission_id"]}

    def alive(self):
        """How many hosts are nodes of the cluster, the head among them."""
        return sum(
            node["raylet"].get("state") == "ALIVE" for node in self.ask("/nodes?view=summary")["data"]["summary"]
        )

    def preempt(self, node):
        """End a node's Ray in order, and, when its other processes have ended too, the node."""
        self.run(node, sys.executable, "-P", "-m", "ray.scripts.scripts", "stop", "--grace-period", "20")
        self._await("the end of launchers", lambda: not self.has_launcher(node))
        self.kill(node)

    def lose_head(self):
        """Kill the head's processes of Ray, and the job's with them; the nodes find out by themselves."""
        self.run("head", sys.executable, "-P", "-m", "ray.scripts.scripts", "stop", "--force")
        self._await("the end of launchers", lambda: not any(map(self.has_launcher, self.nodes)))

    def has_launcher(self, node):
        return self.run(node, "pgrep", "-f", r"lockstep\.(run|__main__)").returncode == 0

    def start_again(self):
        """Boot all hosts."""
        for host in [*self.nodes, "head"]:
            self._kill_host(host)
        self._boot("head")
        self._begin()
        self.calm()

    def calm(self):
        """Stop every job, heal every node, and wait until all is idle."""
        for name, job in self.jobs().items():
            if job["status"] in ("PENDING", "RUNNING"):
                self.ask(f"/api/jobs/{name}/stop", "POST")
        for node in self.nodes:
            self.heal(node)
        over = ("SUCCEEDED", "FAILED", "STOPPED")
        self._await("the end of all jobs", lambda: all(job["status"] in over for job in self.jobs().values()))
        self._await("all nodes", lambda: self.alive() == self.num_nodes + 1)
