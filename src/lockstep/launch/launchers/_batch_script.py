"""The text of an sbatch script: one task per machine, each of which runs `lockstep train ... --node-rank N`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_PORT, PORTS = 20000, 10000
"""The port follows from the job's number: two jobs on one machine seldom meet, and a requeued one keeps its port."""
REMARKS = {
    "ntasks-per-node": "which starts the machine's processes",
    "cpus-per-task": "for all of them",
    "signal": "B: to this shell; the run saves, and goes back to the queue",
    "requeue": "after a pre-emption, or the loss of a machine",
    "open-mode": "the next start writes on",
    "no-kill": "when a machine is lost, the others go on",
}
REMARK_COLUMN = 40
RUN = """
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # less about names of hosts that cannot be looked up
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((@FIRST_PORT@ + SLURM_JOB_ID % @PORTS@))

# A warning (time limit, pre-emption) is passed on: all processes finish their step, save and end with exit code 75.
run=
trap 'echo "job $SLURM_JOB_ID was warned: the run saves, and ends" >&2; kill -USR1 "$run"' USR1 TERM

# shellcheck disable=SC2016 # each task reads its own SLURM_NODEID
srun @SRUN@ \\
    bash -c 'exec @COMMAND@ train "$@" --node-rank "$SLURM_NODEID"' lockstep \\
    @ARGUMENTS@ --rendezvous "$head:$port" &
run=$!
while kill -0 "$run" 2>/dev/null; do
    wait "$run" # a signal ends the waiting, but not the run
done
wait "$run"
code=$?

# 75: interrupted; 138: the same, before Python was up; 5: a machine was lost, and too few are left. All of these go on
# from the newest checkpoint in another start, unless the job is being ended: cancelled, or requeued by Slurm itself.
job=$(scontrol show job "$SLURM_JOB_ID")
if [[ $code =~ ^(75|138|5)$ && $job == *Requeue=1* && $job == *JobState=RUNNING* ]] &&
    ((${SLURM_RESTART_COUNT:-0} < @REQUEUES@)); then
    echo "job $SLURM_JOB_ID ended with exit code $code and goes back to the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What an sbatch script depends on."""

    opening: Sequence[str]
    """What it says of itself."""
    options: Mapping[str, str | None]
    """sbatch's options -> value; None: a switch."""
    setup: Sequence[str] = ()
    """Lines of shell before the run."""
    srun: Sequence[str] = ()
    """Further options of srun, each as shell reads it."""
    command: str = "lockstep"
    """What runs Lockstep on the machines, as shell reads it (without single quotes)."""
    arguments: str
    """The config file and what follows it, as shell reads them."""
    requeues: int
    """How often the job may go back to the queue."""

    def text(self) -> str:
        srun = ['--cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0', *self.srun]
        run = RUN
        for name, value in {
            "FIRST_PORT": str(FIRST_PORT),
            "PORTS": str(PORTS),
            "SRUN": " \\\n    ".join(srun),
            "COMMAND": self.command,
            "ARGUMENTS": self.arguments,
            "REQUEUES": str(self.requeues),
        }.items():
            run = run.replace(f"@{name}@", value)
        opening = ["#!/bin/bash", *(f"# {line}".rstrip() for line in self.opening)]
        lines = [*opening, *map(_option, self.options.items()), "", "set -u -o pipefail", *self.setup]
        return "\n".join(lines) + "\n" + run


def _option(option: tuple[str, str | None]) -> str:
    name, value = option
    quoted = f'"{value}"' if value and " " in value else value
    line = f"#SBATCH --{name}" + ("" if value is None else f"={quoted}")
    return f"{line:<{REMARK_COLUMN}} # {REMARKS[name]}" if name in REMARKS else line
