"""Pods of a Kubernetes cluster: a manifest in the run's folder, handed in, asked about and deleted by kubectl."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.base.config import MANY
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import LaunchError
from lockstep.launch.launchers._kubernetes_config import KubernetesSection
from lockstep.launch.launchers._kubernetes_manifest import MARGIN_SECONDS, JobNames, manifest, name_of, relocated

RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "trainjob": "trainjobs.trainer.kubeflow.org"}
"""launch.resource -> its name for kubectl."""
REQUEST_SECONDS = 30
NAME = r"^[A-Za-z0-9][A-Za-z0-9.-]*$"
REMEDIES = {
    "doesn't have a resource type": "install JobSet or Kubeflow Trainer in the cluster, or set launch.resource to the "
    "one that is there (docs/kubernetes.md)",
    "no matches for kind": "install JobSet or Kubeflow Trainer in the cluster, or set launch.resource to the one that "
    "is there (docs/kubernetes.md)",
    "unknown field": "the cluster's JobSet, Kubeflow Trainer or Kubernetes is older than docs/kubernetes.md asks for",
    "orbidden": "ask for the right to do this in that namespace, or set launch.namespace to another",
    "does not exist": "`kubectl config get-contexts` lists what launch.context can be",
    'namespaces "': "create the namespace, or set launch.namespace to another",
}
"""What kubectl says -> what to do about it."""
UNREACHABLE = "see whether `kubectl cluster-info` answers; KUBECONFIG or launch.context names the cluster"


class Config(KubernetesSection):
    """Pods of a Kubernetes cluster, handed in by kubectl as a JobSet or as a Kubeflow TrainJob."""


class Note(BaseModel):
    """What is noted of a job in the run's folder; no name can be taken for an option of kubectl."""

    model_config = ConfigDict(strict=True)

    resource: Literal["jobset", "trainjob"]
    name: str = Field(pattern=NAME, max_length=253)
    grace_seconds: int = Field(ge=1, le=MANY)
    namespace: str | None = Field(None, pattern=NAME, max_length=253)
    context: str | None = Field(None, pattern=r"^[^-]", max_length=1024)


class Kubernetes:
    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards
        self.name, self.folder = config.name, ""

    def plan(self, request: Request) -> Plan:
        """The manifest and the command that hands it in. Raises LaunchError for more processes than GPUs, and for a
        start that cannot be repeated."""
        section, file = self.config, request.folder / "kubernetes.yaml"
        processes = section.processes_of_pod(self.threads, self.shards)
        if section.gpus and processes > section.gpus:
            raise LaunchError(
                f"launch.processes={processes} but launch.gpus={section.gpus}: set launch.processes={section.gpus}"
            )
        _refuse_to_go_back(request.arguments)
        self.name = name = section.name or name_of(request.folder.name)
        job = JobNames(
            name=name,
            section=section,
            recipe=relocated(request.text, Path.cwd(), section, name=name, processes=processes),
            file=request.recipe.name,
            arguments=request.arguments,
            run=request.folder.name,
            threads=self.threads,
        )
        self.folder = job.folder
        return Plan(argv=_kubectl(self.note(), "apply", "-f", str(file)), files={file: manifest(job)})

    def run(self, plan: Plan, logs: Path) -> int:
        """Hand the manifest in and return 0. A job of that name that has ended makes room for it, and the run goes on
        from its newest checkpoint. Raises LaunchError where the job still runs, and where kubectl fails."""
        note = self.note()
        found = _get(note)
        if found is not None:
            state = State.of(found)
            if not state.has_ended:
                raise LaunchError(
                    f"{_called(note)} {state.text}: cancel it with `lockstep cancel {logs.parent}`, or choose "
                    "another run.name"
                )
            _call(note, "delete", RESOURCES[note["resource"]], note["name"], "--cascade=foreground")
        _ask(plan.argv)
        pods = f"jobset.sigs.k8s.io/jobset-name={note['name']},batch.kubernetes.io/job-completion-index=0"
        run = logs.parent
        sys.stdout.write(
            f"handed in {_called(note)}\n  lockstep status {run}\n  lockstep cancel {run}\n"
            f"  {' '.join(_kubectl(note, 'logs', '-f', '--tail=-1', '-l', pods))}\n"
            f"  where the volume is mounted: lockstep logs {self.folder} -f\n"
        )
        return 0

    def note(self) -> dict[str, Any]:
        """The job's name, and where to ask for it."""
        if self.name is None:
            return {}
        facts = {"resource": self.config.resource, "name": self.name, "grace_seconds": self.config.grace_seconds}
        return facts | {"namespace": self.config.namespace, "context": self.config.context}

    def status(self, note: Mapping[str, Any]) -> str:
        """How the cluster says the job is."""
        found = _get(note)
        if found is None:
            return f"{_called(note)} is not in the cluster: it was deleted, or never handed in"
        return f"{_called(note)} {State.of(found).text}"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        """What rank 0 has said: what pods print is kept by the cluster."""
        return logs / "rank-0.log"

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Delete it. Its pods are asked to end, and have their grace period to save."""
        found = _get(note)
        if found is None:
            raise LaunchError(f"{_called(note)} is not in the cluster: there is nothing to cancel")
        state, names = State.of(found), [f"{RESOURCES[note['resource']]}/{note['name']}"]
        names.append(f"configmap/{note['name']}-recipe")
        _call(note, "delete", *names, "--cascade=foreground", "--wait=false", "--ignore-not-found")
        if state.has_ended:
            return f"deleted {_called(note)}, which {state.text}"
        patience = note["grace_seconds"] + MARGIN_SECONDS
        return f"deleted {_called(note)}: its pods save and end, within {patience} s"


@dataclass(frozen=True, kw_only=True)
class State:
    text: str
    has_ended: bool

    @classmethod
    def of(cls, found: Mapping[str, Any], now: datetime | None = None) -> "State":
        """Of a JobSet or a TrainJob, as kubectl gives it."""
        status, spec = found.get("status", {}), found.get("spec", {})
        began = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
        age = f"handed in {_ago((now or datetime.now(UTC)) - began)}"
        true = {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}
        if "Completed" in true or "Complete" in true:
            return cls(text=f"has completed ({age})", has_ended=True)
        if failed := true.get("Failed"):
            why = ": ".join(part for part in (failed.get("reason"), failed.get("message")) if part)
            return cls(text=f"has failed ({why}; {age})", has_ended=True)
        if spec.get("suspend"):
            return cls(text=f"is suspended, or waits in a queue ({age})", has_ended=False)
        jobs = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
        does = "runs" if any(job.get("ready") for job in jobs) else "waits for pods"
        again = f"started again {status['restarts']} times, " if status.get("restarts") else ""
        return cls(text=f"{does} ({again}{age})", has_ended=False)


def _ago(age: timedelta) -> str:
    minutes = max(0, int(age.total_seconds() // 60))
    return f"{minutes // 60} h {minutes % 60} min ago" if minutes >= 60 else f"{minutes} min ago"


def _refuse_to_go_back(arguments: tuple[str, ...]) -> None:
    """A pod that is started again is given the same arguments, by a cluster that knows nothing of checkpoints."""
    asked = dict(zip(arguments, arguments[1:], strict=False)).get("--resume", "auto")
    if asked != "auto":
        raise LaunchError(
            f"--resume {asked}: every pod that is started again would do so too, so launch.kind=kubernetes takes only "
            "auto. For a fresh start choose a new run.name"
        )


def _called(note: Mapping[str, Any]) -> str:
    place = f" in namespace {note['namespace']}" if note.get("namespace") else ""
    return f"{note['resource']} {note['name']}{place}"


# ---- kubectl


def _kubectl(note: Mapping[str, Any], *arguments: str) -> tuple[str, ...]:
    """The command, in the cluster and namespace of a job."""
    where = [("--context", note.get("context")), ("--namespace", note.get("namespace"))]
    return ("kubectl", *(word for option, value in where if value for word in (option, value)), *arguments)


def _get(note: Mapping[str, Any]) -> dict[str, Any] | None:
    """The job; None where there is none. Raises LaunchError."""
    resource = RESOURCES[note["resource"]]
    text = _call(note, "get", resource, note["name"], "--ignore-not-found", "--output=json")
    return json.loads(text) if text.strip() else None


def _call(note: Mapping[str, Any], *arguments: str) -> str:
    return _ask(_kubectl(note, *arguments))


def _ask(argv: tuple[str, ...]) -> str:
    """Run kubectl -> what it prints. Raises LaunchError with all that it says, and what to do."""
    waits = () if "delete" in argv and "--wait=false" not in argv else (f"--request-timeout={REQUEST_SECONDS}s",)
    try:
        done = subprocess.run([*argv, *waits], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            "there is no kubectl on this machine's PATH: install it (https://kubernetes.io/docs/tasks/tools), or take "
            "the manifest that --dry-run prints to a machine that has it"
        ) from None
    except OSError as error:
        raise LaunchError(f"kubectl cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip()
        remedy = next((what for sign, what in REMEDIES.items() if sign in said), UNREACHABLE)
        raise LaunchError(f"`{' '.join(argv)}` failed:\n{said}\n{remedy}")
    return done.stdout


def build(config: Config, *, threads: int, shards: int) -> Kubernetes:
    """The launcher; `threads` is how many each process may use, `shards` how many processes can find work."""
    return Kubernetes(config, threads=threads, shards=shards)
