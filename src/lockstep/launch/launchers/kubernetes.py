"""Pods of a Kubernetes cluster: a manifest in the run's folder, submitted, queried and deleted with kubectl."""

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.base.config import MANY
from lockstep.base.contracts import Launcher, Plan, Request
from lockstep.base.errors import LaunchError
from lockstep.launch.launchers._kubernetes_config import Config as Config
from lockstep.launch.launchers._kubernetes_manifest import MARGIN_SECONDS, job_name, manifest, relocate

RESOURCES = {"jobset": "jobsets.jobset.x-k8s.io", "trainjob": "trainjobs.trainer.kubeflow.org"}
"""launch.resource -> kubectl's resource name."""
REQUEST_SECONDS = 30
NAME = r"^[A-Za-z0-9][A-Za-z0-9.-]*$"
REMEDIES = {
    **dict.fromkeys(
        ("doesn't have a resource type", "no matches for kind"),
        "install JobSet or Kubeflow Trainer in the cluster, or set launch.resource to the one that is there "
        "(docs/kubernetes.md)",
    ),
    "unknown field": "the cluster's JobSet, Kubeflow Trainer or Kubernetes is older than docs/kubernetes.md requires",
    "orbidden": "ask for permission in that namespace, or set launch.namespace to another",
    "does not exist": "`kubectl config get-contexts` lists what launch.context can be",
    'namespaces "': "create the namespace, or set launch.namespace to another",
}
"""Text in kubectl's error -> what to do about it."""
UNREACHABLE = "check whether `kubectl cluster-info` answers; KUBECONFIG or launch.context names the cluster"


class Note(BaseModel):
    """Record of a job in job.json in the run's folder; no name in it can pass for an option of kubectl."""

    model_config = ConfigDict(strict=True)

    resource: Literal["jobset", "trainjob"]
    name: str = Field(pattern=NAME, max_length=253)
    grace_seconds: int = Field(ge=1, le=MANY)
    namespace: str | None = Field(None, pattern=NAME, max_length=253)
    context: str | None = Field(None, pattern=r"^[^-]", max_length=1024)


class Kubernetes(Launcher):
    """Submits runs to a cluster: processes with `threads` threads each, by default no more than `shards`."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards
        self.name, self.folder = config.name, ""

    def plan(self, request: Request) -> Plan:
        """Plan the manifest and the command that submits it. Raises LaunchError for more processes than GPUs, and for
        arguments that a restarted pod must not repeat."""
        section, file = self.config, request.folder / "kubernetes.yaml"
        # at submission: a pod that is limited to 4 of 64 cores sees all 64
        processes = section.processes_with(
            gpus=section.gpus, cores=section.cpus, threads=self.threads, shards=self.shards
        )
        if section.gpus and processes > section.gpus:
            raise LaunchError(
                f"launch.processes={processes} but launch.gpus={section.gpus}: set launch.processes={section.gpus}"
            )
        resume = dict(zip(request.arguments, request.arguments[1:], strict=False)).get("--resume", "auto")
        if resume != "auto":
            raise LaunchError(
                f"--resume {resume}: every restarted pod would do so again, so launch.kind=kubernetes takes only auto. "
                "For a fresh start choose a new run.name"
            )
        self.name = name = section.name or job_name(request.folder.name)
        recipe = relocate(request.text, Path.cwd(), section, name=name, processes=processes)
        self.folder = f"{recipe['run']['dir']}/{request.folder.name}"
        text = manifest(section, request, name=name, recipe=recipe, threads=self.threads)
        return Plan(argv=_kubectl(self.note(), "apply", "-f", str(file)), files={file: text})

    def run(self, plan: Plan, logs: Path) -> int:
        """Submit the manifest and return 0. A finished job of that name is deleted first, and the run resumes from its
        newest checkpoint. Raises LaunchError if the job still runs, or if kubectl fails."""
        note = self.note()
        job = _get(note)
        if job is not None:
            text, has_ended = state_of(job)
            if not has_ended:
                raise LaunchError(
                    f"{_describe(note)} {text}: cancel it with `lockstep cancel {logs.parent}`, or choose "
                    "another run.name"
                )
            _run(_kubectl(note, "delete", RESOURCES[note["resource"]], note["name"], "--cascade=foreground"))
        _run(plan.argv)
        pods = f"jobset.sigs.k8s.io/jobset-name={note['name']},batch.kubernetes.io/job-completion-index=0"
        run = logs.parent
        sys.stdout.write(
            f"submitted {_describe(note)}\n  lockstep status {run}\n  lockstep cancel {run}\n"
            f"  {' '.join(_kubectl(note, 'logs', '-f', '--tail=-1', '-l', pods))}\n"
            f"  where the volume is mounted: lockstep logs {self.folder} -f\n"
        )
        return 0

    def note(self) -> dict[str, Any]:
        """Return the job's name and cluster."""
        if self.name is None:
            return {}
        job = {"resource": self.config.resource, "name": self.name, "grace_seconds": self.config.grace_seconds}
        return job | {"namespace": self.config.namespace, "context": self.config.context}

    def status(self, note: Mapping[str, Any]) -> str:
        job = _get(note)
        if job is None:
            return f"{_describe(note)} is not in the cluster: it was deleted, or never submitted"
        return f"{_describe(note)} {state_of(job)[0]}"

    def is_over(self, note: Mapping[str, Any]) -> bool:
        job = _get(note)
        return job is None or state_of(job)[1]

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Delete the job; its pods save a checkpoint within their grace period."""
        job = _get(note)
        if job is None:
            raise LaunchError(f"{_describe(note)} is not in the cluster: there is nothing to cancel")
        names = f"{RESOURCES[note['resource']]}/{note['name']}", f"configmap/{note['name']}-recipe"
        _run(_kubectl(note, "delete", *names, "--cascade=foreground", "--wait=false", "--ignore-not-found"))
        text, has_ended = state_of(job)
        if has_ended:
            return f"deleted {_describe(note)}, which {text}"
        seconds = note["grace_seconds"] + MARGIN_SECONDS
        return f"deleted {_describe(note)}: its pods save and stop, within {seconds} s"


def state_of(job: Mapping[str, Any], now: datetime | None = None) -> tuple[str, bool]:
    """Describe the state of a JobSet or a TrainJob, from kubectl's JSON -> a phrase, and whether it has ended."""
    status, spec = job.get("status", {}), job.get("spec", {})
    created = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    age = f"submitted {_ago((now or datetime.now(UTC)) - created)}"
    conditions = {c["type"]: c for c in status.get("conditions", []) if c["status"] == "True"}
    if "Completed" in conditions or "Complete" in conditions:
        return f"has completed ({age})", True
    if failed := conditions.get("Failed"):
        reason = ": ".join(text for text in (failed.get("reason"), failed.get("message")) if text)
        return f"has failed ({reason}; {age})", True
    if spec.get("suspend"):
        return f"is suspended or queued ({age})", False
    jobs = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
    phase = "runs" if any(job.get("ready") for job in jobs) else "waits for pods"
    restarts = f"{status['restarts']} restarts, " if status.get("restarts") else ""
    return f"{phase} ({restarts}{age})", False


def _ago(age: timedelta) -> str:
    minutes = max(0, int(age.total_seconds() // 60))
    return f"{minutes // 60} h {minutes % 60} min ago" if minutes >= 60 else f"{minutes} min ago"


def _describe(note: Mapping[str, Any]) -> str:
    namespace = f" in namespace {note['namespace']}" if note.get("namespace") else ""
    return f"{note['resource']} {note['name']}{namespace}"


# ---- kubectl


def _kubectl(note: Mapping[str, Any], *arguments: str) -> tuple[str, ...]:
    """Return the kubectl command for the cluster and namespace of a job."""
    scope = [("--context", note.get("context")), ("--namespace", note.get("namespace"))]
    return ("kubectl", *(word for option, value in scope if value for word in (option, value)), *arguments)


def _get(note: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the job, None if the cluster has none. Raises LaunchError."""
    what = RESOURCES[note["resource"]], note["name"]
    text = _run(_kubectl(note, "get", *what, "--ignore-not-found", "--output=json"))
    return json.loads(text) if text.strip() else None


def _run(argv: tuple[str, ...]) -> str:
    """Run kubectl -> its output. Raises LaunchError with its error and a remedy."""
    is_waiting = "delete" in argv and "--wait=false" not in argv
    timeout = () if is_waiting else (f"--request-timeout={REQUEST_SECONDS}s",)
    try:
        done = subprocess.run([*argv, *timeout], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            "there is no kubectl on this machine's PATH: install it (https://kubernetes.io/docs/tasks/tools), or take "
            "the manifest that --dry-run prints to a machine that has it"
        ) from None
    except OSError as error:
        raise LaunchError(f"kubectl cannot be run: {error.strerror}") from None
    if done.returncode:
        complaint = done.stderr.strip()
        remedy = next((remedy for text, remedy in REMEDIES.items() if text in complaint), UNREACHABLE)
        raise LaunchError(f"`{' '.join(argv)}` failed:\n{complaint}\n{remedy}")
    return done.stdout


build = Kubernetes
