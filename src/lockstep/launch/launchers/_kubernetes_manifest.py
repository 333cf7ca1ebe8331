"""What is handed to the cluster: a ConfigMap with the recipe, and a JobSet or a TrainJob, as one YAML text.

Fields are those of jobset.x-k8s.io/v1alpha2, trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.3), batch/v1, core/v1.
"""

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.base.errors import CheckpointError, Desync, Interrupted, NonFiniteLoss
from lockstep.base.yaml_text import BREAKS, YamlDumper, YamlLoader
from lockstep.launch.elastic.environment import environment
from lockstep.launch.launchers._kubernetes_config import LONGEST_NAME, KubernetesSection, is_label

NODE = "node"
"""The replicated job and its container; Kubeflow's runtime for torch calls both so too."""
RECIPES = "/etc/lockstep"
"""Where pods see the recipe."""
MARGIN_SECONDS = 30
"""Beyond launch.grace_seconds: for nodes to tell each other, and to leave."""
FINAL = sorted({CheckpointError.exit_code, NonFiniteLoss.exit_code, Desync.exit_code})
"""Exit codes after which any further start would end the same."""
AGAIN = [Interrupted.exit_code]
"""Exit codes of pods that were asked to end, and come back without being counted."""

Part = dict[str, Any]
"""Of a manifest: keys with values."""
Items = list[Any]
"""Of a manifest: a list."""


@dataclass(frozen=True, kw_only=True)
class JobNames:
    """A run as the cluster is told of it."""

    name: str
    section: KubernetesSection
    recipe: Part
    """The config, with paths as pods see them."""
    file: str
    """What its file is called."""
    arguments: tuple[str, ...]
    """Further ones of `lockstep train`."""
    run: str
    """The run's name."""
    threads: int
    """Of each process."""

    @property
    def folder(self) -> str:
        """The run's folder as pods see it."""
        return f"{self.recipe['run']['dir']}/{self.run}"

    @property
    def host(self) -> str:
        """The first pod's name, the same for whichever pod takes its place."""
        return f"{self.name}-{NODE}-0-0.{self.name}"

    @property
    def meta(self) -> Part:
        """Name, labels and annotations of everything that is made."""
        place = {"namespace": self.section.namespace} if self.section.namespace else {}
        return {"name": self.name, **place, "labels": self.labels, "annotations": {"lockstep/run": self.run}}

    @property
    def labels(self) -> Part:
        """To find the run's objects by."""
        return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": self.name}


def name_of(run: str) -> str:
    """A valid name of a job for a run's: the same where it is valid; else with a digest, so that no two are alike."""
    if is_label(run):
        return run
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}"
    return f"{plain[: LONGEST_NAME - len(digest) - 1].strip('-')}-{digest}"


def manifest(job: JobNames) -> str:
    head = (
        f"# Run {job.run} of Lockstep. Written by `lockstep train`, and written over by the next one.\n"
        "# By hand: kubectl apply -f THIS_FILE. To stop it, with a checkpoint: kubectl delete -f THIS_FILE.\n"
    )
    resource = _jobset(job) if job.section.resource == "jobset" else _trainjob(job)
    documents = yaml.dump_all([_config_map(job), resource], Dumper=Readable, sort_keys=False, allow_unicode=True)
    return head + documents


class Readable(YamlDumper):
    """YAML for people and for Go: texts of several lines as such, nothing by reference, and quotes around what Go's
    reader takes for something else than Python's does."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    if "\n" in text and not set(text) & set(BREAKS):
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    return YamlDumper.yaml_representers[str](dumper, text)


Readable.add_representer(str, _text)
Readable.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]$"), list("yYnN"))
Readable.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0[oO][0-7]+$"), list("-+0"))


def relocated(text: str, here: Path, section: KubernetesSection, **launch: Any) -> Part:
    """A recipe as pods see it: paths below `here` lie in the volume, as do the folder of runs and the cache."""
    recipe: Part = _moved(yaml.load(text, Loader=YamlLoader) or {}, str(here), section.mount)
    for part, key, place in (("run", "dir", "runs"), ("data", "cache", ".cache/lockstep")):
        folder = str(recipe.get(part, {}).get(key, ""))
        if key == "dir" or folder:
            is_there = folder.startswith(f"{section.mount}/")
            recipe.setdefault(part, {})[key] = folder if is_there else f"{section.mount}/{place}"
    recipe["launch"] = {**recipe.get("launch", {}), **launch}
    return recipe


def _moved(value: Any, here: str, mount: str) -> Any:
    if isinstance(value, dict):
        return {key: _moved(inner, here, mount) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, here, mount) for inner in value]
    if isinstance(value, str) and (value == here or value.startswith(f"{here.rstrip('/')}/")):
        return mount + value[len(here.rstrip("/")) :]
    return value


def _config_map(job: JobNames) -> Part:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**job.meta, "name": f"{job.name}-recipe"},
        "data": {job.file: yaml.dump(job.recipe, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)},
    }


# ---- a pod


def _script(job: JobNames) -> str:
    """What a pod's shell runs. The first pod's name is known only once it has a machine, which no time-out of ours can
    tell from a name that is wrong; so the shell waits for it, and ends at once when asked to. Then it hands over, so
    that signals reach Lockstep itself. The first pod calls itself by its bare name, which is in its /etc/hosts: of the
    other one, DNS may still tell where the pod was whose place it has taken."""
    command = ["lockstep", "train", f"{RECIPES}/{job.file}", *job.arguments]
    own = job.host.partition(".")[0]
    return (
        f"trap 'exit {Interrupted.exit_code}' TERM INT\n"
        f"cd {shlex.quote(job.section.mount)} || exit 1\n"
        f'if [ "$JOB_COMPLETION_INDEX" = 0 ]; then first={own}; else first={job.host}; fi\n'
        'until getent hosts "$first" > /dev/null; do sleep 1; done\n'
        f"exec {shlex.join(command)} "
        f'--rendezvous "$first:{job.section.port}" --node-rank "$JOB_COMPLETION_INDEX"\n'
    )


def _environment(job: JobNames) -> Items:
    """Variables, with downloads of models kept in the volume."""
    mount = job.section.mount
    found = environment(job.section, threads=job.threads, logs=Path(job.folder) / "logs")
    return [
        {"name": name, "value": value} for name, value in ({"HF_HOME": f"{mount}/.cache/huggingface"} | found).items()
    ]


def _resources(section: KubernetesSection) -> Part:
    """Limits as large as requests: such a pod is the last to be evicted."""
    amounts: Part = {"cpu": str(section.cpus), "memory": section.memory}
    if section.gpus:
        amounts[section.gpu_resource] = str(section.gpus)
    return {"requests": amounts, "limits": amounts}


def _volumes(job: JobNames) -> Items:
    return [
        {"name": "recipe", "configMap": {"name": f"{job.name}-recipe"}},
        {"name": "workspace", "persistentVolumeClaim": {"claimName": job.section.volume}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.section.shared_memory}},
    ]


def _mounts(job: JobNames) -> Items:
    return [
        {"name": "recipe", "mountPath": RECIPES, "readOnly": True},
        {"name": "workspace", "mountPath": job.section.mount},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _restricted() -> Part:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _pod(job: JobNames) -> Part:
    """What is said of pods, in the same words, to a JobSet and to a TrainJob."""
    section = job.section
    secrets = [{"name": name} for name in section.image_pull_secrets]
    owner = {"runAsUser": section.user, "runAsGroup": section.user, "fsGroup": section.user} if section.user else {}
    change = {"fsGroupChangePolicy": "OnRootMismatch"} if section.user else {}  # not file by file at every start
    return {
        **({"serviceAccountName": section.service_account} if section.service_account else {}),
        **({"imagePullSecrets": secrets} if secrets else {}),
        **({"nodeSelector": section.node_selector} if section.node_selector else {}),
        **({"tolerations": list(section.tolerations)} if section.tolerations else {}),
        "terminationGracePeriodSeconds": section.grace_seconds + MARGIN_SECONDS,
        "securityContext": {"runAsNonRoot": True, **owner, **change, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": _volumes(job),
    }


def merged(base: Any, extra: Any) -> Any:
    """Two parts of a manifest as one: mappings key by key, lists item by item where these have names; else `extra`."""
    if isinstance(base, dict) and isinstance(extra, dict):
        both = {key: merged(value, extra[key]) if key in extra else value for key, value in base.items()}
        return both | {key: value for key, value in extra.items() if key not in base}
    if isinstance(base, list) and isinstance(extra, list):
        new = {_key(item): item for item in extra}
        changed = [merged(item, new.pop(_key(item))) if _key(item) in new else item for item in base]
        return changed + list(new.values())
    return extra


def _key(item: Any) -> str:
    """What tells an item of a list from others."""
    if isinstance(item, dict):
        return str(item.get("mountPath") or item.get("name") or item)
    return str(item)


# ---- the two resources


def _jobset(job: JobNames) -> Part:
    """One indexed Job whose pods are the nodes. It is over when node 0 is, which decides for all. A pod that fails for
    good fails it at once; one that the cluster took away comes back alone and joins the others; any other failure
    starts all pods again, once the old ones have gone, since two of a node must not write to one run."""
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job.meta,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": job.section.pod_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [final],
            },
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": _indexed(job)}}],
        },
    }


def _indexed(job: JobNames) -> Part:
    nodes = job.section.max_nodes
    taken_away = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [_on_exit("FailJob", FINAL), taken_away, _on_exit("Ignore", AGAIN)]},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": _template(job),
    }


def _on_exit(action: str, codes: list[int]) -> Part:
    return {"action": action, "onExitCodes": {"containerName": NODE, "operator": "In", "values": codes}}


def _template(job: JobNames) -> Part:
    section = job.section
    container = {
        "name": NODE,
        "image": section.image,
        "command": ["sh", "-c"],
        "args": [_script(job)],
        "env": _environment(job),
        "ports": [{"name": "rendezvous", "containerPort": section.port}],
        "resources": _resources(section),
        "securityContext": _restricted(),
        "volumeMounts": _mounts(job),
    }
    pod = {
        "restartPolicy": "Never",  # a podFailurePolicy asks for it
        "automountServiceAccountToken": section.service_account is not None,
        "enableServiceLinks": False,
        **_pod(job),
        "containers": [container],
    }
    template: Part = merged({"metadata": {"labels": job.labels}, "spec": pod}, section.extra)
    return template


def _trainjob(job: JobNames) -> Part:
    """The runtime brings the JobSet, with its own rules for failures; here is what is changed in it."""
    section = job.section
    container = {"name": NODE, "volumeMounts": _mounts(job), "securityContext": _restricted()}
    pod = {"metadata": {"labels": job.labels}, "spec": {**_pod(job), "containers": [container]}}
    patched = {"name": NODE, "template": {"spec": {"template": merged(pod, section.extra)}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": job.meta,
        "spec": {
            "runtimeRef": {"name": section.runtime},
            "trainer": {
                "image": section.image,
                "command": ["sh", "-c"],
                "args": [_script(job)],
                "numNodes": section.max_nodes,
                "resourcesPerNode": _resources(section),
                "env": _environment(job),
            },
            "runtimePatches": [
                {
                    "manager": "lockstep",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patched]}}},
                }
            ],
        },
    }
