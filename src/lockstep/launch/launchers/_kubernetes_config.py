"""Settings of the Kubernetes launcher."""

from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator

from lockstep.base.config import MANY
from lockstep.launch.launch_config import LiveLaunchSection

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"
"""RFC 1035, required of a JobSet's or TrainJob's name because a Service has the same; stricter than RFC 1123."""
SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""RFC 1123, for the names of nearly all other objects."""
LONGEST_NAME = 45
"""Pods are named NAME-node-0-9999-abcde, with at most 63 characters."""
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

Name = Annotated[str, StringConstraints(pattern=rf"^{SUBDOMAIN}$", max_length=253)]
Size = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(Ki|Mi|Gi|Ti)$")]


def size_of(text: str) -> int:
    """Return the bytes of a size such as 16Gi."""
    return int(text[:-2]) * UNITS[text[-2:]]


def _is_mount(path: str) -> str:
    if not path.startswith("/") or path == "/" or str(PurePosixPath(path)) != path or ".." in path or ":" in path:
        raise ValueError("should be an absolute folder other than /, such as /workspace")
    return path


class Config(LiveLaunchSection):
    """Pods of a Kubernetes cluster, submitted with kubectl as a JobSet or as a Kubeflow TrainJob."""

    SUBMITS: ClassVar[bool] = True

    resource: Literal["jobset", "trainjob"] = "jobset"
    """The resource to submit: a JobSet (jobset.x-k8s.io), or a TrainJob of Kubeflow Trainer (trainer.kubeflow.org)."""
    name: Annotated[str, StringConstraints(pattern=rf"^{LABEL}$", max_length=LONGEST_NAME)] | None = None
    """The resource's name: lower-case letters, digits and '-'; by default made from the run's name."""
    namespace: Name | None = None
    """Namespace; by default that of kubectl's current context."""
    context: str | None = None
    """kubectl's context, which selects the cluster; by default the current one."""
    image: str = Field(min_length=1, max_length=500)
    """The container image, with Lockstep in it, such as registry.example/lockstep:1 (deploy/train.Dockerfile)."""
    volume: Name
    """The PersistentVolumeClaim, with access mode ReadWriteMany, for runs and data."""
    mount: Annotated[str, AfterValidator(_is_mount)] = "/workspace"
    """Mount path of the volume. Paths of the config below the current folder become paths below it."""
    gpus: int = Field(0, ge=0, le=2**10)
    """GPUs per pod."""
    gpu_resource: Annotated[str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = "nvidia.com/gpu"
    """The cluster's resource name for a GPU."""
    cpus: int = Field(4, ge=1, le=2**14)
    """CPU cores per pod; without GPUs, launch.processes=auto runs as many processes as fit."""
    memory: Size = "16Gi"
    """Memory per pod, including /dev/shm."""
    shared_memory: Size = "2Gi"
    """Size of /dev/shm, which worker processes and data loaders of a pod use to exchange data."""
    port: int = Field(29400, ge=1024, lt=2**16)
    """Port of the rendezvous on the first pod."""
    runtime: Name = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""
    user: int | None = Field(1000, ge=1, lt=2**31)
    """The user and group that pods run as and that owns the volume; null: that of the image or the cluster, never
    root."""
    pod_restarts: int = Field(3, ge=0, le=MANY)
    """How often all pods of a JobSet restart after one failed by itself. Pods that were evicted or preempted, or that
    exited with code 75, come back without being counted."""
    join_timeout_seconds: float = Field(1800.0, gt=0, le=MANY)
    """How long the rendezvous waits: a cluster may need minutes for a new node, and six to give up a lost one."""
    extra: dict[str, Any] = {}
    """Anything else, merged into the pod template: {spec: {nodeSelector: {pool: h100}, priorityClassName: high}}."""

    @field_validator("shared_memory")
    @classmethod
    def _fits(cls, size: str, info: ValidationInfo) -> str:
        if "memory" in info.data and size_of(size) >= size_of(info.data["memory"]):
            raise ValueError(f"should be less than launch.memory ({info.data['memory']}), which includes it")
        return size

    @field_validator("extra")
    @classmethod
    def _is_template(cls, extra: dict[str, Any]) -> dict[str, Any]:
        for key in extra.keys() - {"metadata", "spec"}:
            raise ValueError(f"a pod template has metadata and spec, not {key!r}: put it under spec")
        return extra
