"""What can be said about the pods of a run."""

import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator

from lockstep.base.config import MANY
from lockstep.base.errors import nearest
from lockstep.launch.launch_config import LaunchSection

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""RFC 1035, which both resources ask of a job's name since a Service is called like it; narrower than RFC 1123."""
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""RFC 1123: the name of nearly everything else."""
LONGEST_NAME = 45
"""A pod is called NAME-node-0-9999-abcde, which may have 63 characters."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
TOLERATION = {"key", "operator", "value", "effect", "tolerationSeconds"}

Name = Annotated[str, StringConstraints(pattern=rf"^{SUBDOMAIN}$", max_length=253)]
Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$")]


def size_of(text: str) -> int:
    """Bytes of 16Gi."""
    return int(text[:-2]) * UNITS[text[-2:]]


def _is_mount(path: str) -> str:
    if not path.startswith("/") or path == "/" or str(PurePosixPath(path)) != path or ".." in path or ":" in path:
        raise ValueError("should be an absolute folder other than /, such as /workspace")
    return path


class KubernetesSection(LaunchSection):
    """Pods of a Kubernetes cluster, by way of a JobSet or a Kubeflow TrainJob."""

    resource: Literal["jobset", "trainjob"] = "jobset"
    """What is handed in: a JobSet (jobset.x-k8s.io), or a TrainJob of Kubeflow Trainer (trainer.kubeflow.org)."""
    name: Annotated[str, StringConstraints(pattern=rf"^{LABEL}$", max_length=LONGEST_NAME)] | None = None
    """What the job is called there: lower-case letters, digits and '-'; by default made from the run's name."""
    namespace: Name | None = None
    """Where it runs; by default the namespace of kubectl's current context."""
    context: str | None = None
    """kubectl's context, which names the cluster; by default the current one."""
    image: str = Field(min_length=1, max_length=500)
    """The container image, with Lockstep in it, such as registry.example/lockstep:1 (deploy/train.Dockerfile)."""
    volume: Name
    """The PersistentVolumeClaim, of access mode ReadWriteMany, that holds runs and data."""
    mount: Annotated[str, AfterValidator(_is_mount)] = "/workspace"
    """Where pods see it. Paths of the config in the folder that the command is typed in count from there."""
    gpus: int = Field(0, ge=0, le=2**10)
    """GPUs of each pod."""
    gpu_resource: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    cpus: int = Field(4, ge=1, le=2**14)
    """Processor cores of each pod; without GPUs, and with launch.processes=auto, as many processes as fit."""
    memory: Size = "16Gi"
    """Memory of each pod, what it keeps in /dev/shm among it."""
    shared_memory: Size = "2Gi"
    """Size of /dev/shm, through which the processes of a pod and those that load data talk."""
    port: int = Field(29400, ge=1024, lt=2**16)
    """Where pods meet at the first of them."""
    runtime: Name = "torch-distributed"
    """For a TrainJob: the ClusterTrainingRuntime that it is made by."""
    node_selector: dict[str, str] = {}
    """Labels of the machines that pods may run on."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints that they put up with, as Kubernetes writes them: [{key: gpu, operator: Exists, effect: NoSchedule}]."""
    service_account: Name | None = None
    """The account that pods run under; without one they get no token of the cluster's."""
    image_pull_secrets: tuple[Name, ...] = ()
    """Secrets to fetch the image with."""
    user: int | None = Field(1000, ge=1, lt=2**31)
    """The user and group that pods run as, and that the volume is made writable for; null: as the image or the cluster
    says, never root."""
    pod_restarts: int = Field(3, ge=0, le=MANY)
    """For a JobSet: after a pod has failed by itself, start all of them again, at most so often. Pods that the cluster
    took away, and those that ended with exit code 75, come back without being counted."""
    join_timeout_seconds: float = Field(1800.0, gt=0, le=MANY)
    """How long pods wait for each other: the cluster may need minutes for a machine, and six to give up a lost one."""
    extra: dict[str, Any] = {}
    """Anything else, merged into the pod template as it is: {spec: {priorityClassName: high}}."""

    @field_validator("shared_memory")
    @classmethod
    def _fits(cls, size: str, info: ValidationInfo) -> str:
        if "memory" in info.data and size_of(size) >= size_of(info.data["memory"]):
            raise ValueError(f"should be less than launch.memory ({info.data['memory']}), of which it is a part")
        return size

    @field_validator("tolerations")
    @classmethod
    def _are_known(cls, tolerations: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for key in {key for toleration in tolerations for key in toleration} - TOLERATION:
            raise ValueError(f"there is no {key!r} in a toleration{nearest(key, sorted(TOLERATION))}")
        return tolerations

    @field_validator("extra")
    @classmethod
    def _is_template(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for key in extra.keys() - {"metadata", "spec"}:
            raise ValueError(f"a pod template has metadata and spec, not {key!r}: put it under spec")
        return extra

    def processes_of_pod(self, threads: int, shards: int) -> int:
        """How many processes each pod runs, which the machine that hands the job in has to tell: one with 4 of 64
        cores for itself sees all 64."""
        if self.processes != "auto":
            return self.processes
        return self.gpus or max(1, min(self.cpus // threads, -(-shards // self.max_nodes)))


def is_label(text: str) -> bool:
    """Whether a job may be called so."""
    return len(text) <= LONGEST_NAME and re.fullmatch(LABEL, text) is not None
