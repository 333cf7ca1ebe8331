"""The local launcher: processes of this machine, which are started again after a loss."""

import platform
from pathlib import Path

from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import LaunchError
from lockstep.launch.elastic import fork_server
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.node import Node
from lockstep.launch.launchers._own_process import OwnProcess
from lockstep.launch.launchers.local import Config as Config


class Local(OwnProcess):
    def plan(self, request: Request) -> Plan:
        """Plan as an OwnProcess does. Raises LaunchError for several nodes, too."""
        if self.config.min_nodes > 1:
            raise LaunchError(
                f"launch.nodes={self.config.nodes}: run the same command on each machine with --node-rank 0 (1, ...) "
                f"and --rendezvous HOST:PORT, such as --rendezvous {platform.node()}:29400 where this one is node 0"
            )
        return super().plan(request)

    def run(self, plan: Plan, logs: Path) -> int:
        """Run the plan to its end, over restarts -> the exit code: 0, or that of the first process that failed.

        Rank 0 writes to the terminal, the others to logs/rank-N.log. Raises Interrupted after SIGINT or SIGTERM,
        once every process has ended.
        """
        with (
            fork_server.serving(plan.modules, self.config, threads=self.threads) as server,
            Membership(None, 0, self.config) as membership,
        ):
            membership.join(logs.parent)
            return Node(membership, plan, logs, fork_server=server).run()


build = Local
