"""Pods of a JobSet or a TrainJob, as the controllers of a cluster would make them, played by podman on this machine.

What podman 4.3 lacks is done here as the cluster does it: the headless service's names are hostAliases, what fsGroup says
becomes of the volume's folder, and the emptyDir in memory is a folder of this machine's memory.
"""

import copy
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from functools import partial

import yaml
from containers import podman, ran

INDEX = "batch.kubernetes.io/job-completion-index"
SUBNET = "10.213.8"
NETWORK = "lockstep-pods"
RUNTIME = {
    "restartPolicy": "Never",
    "containers": [{"name": "node", "image": "pytorch/pytorch"}],
}
"""The pod of Kubeflow Trainer's runtime torch-distributed, which a TrainJob's trainer and patch change; Never, as in the
JobSet, since this file stands for the controller that restarts."""


def template_of(resource):
    """The pod template that reaches the Job's controller."""
    jobs = resource["spec"]
    if resource["kind"] == "TrainJob":
        jobs = jobs["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    template = copy.deepcopy(jobs["replicatedJobs"][0]["template"]["spec"]["template"])
    if resource["kind"] == "TrainJob":
        trainer, name = resource["spec"]["trainer"], resource["metadata"]["name"]
        (patch,) = template["spec"].pop("containers")
        (node,) = copy.deepcopy(RUNTIME["containers"])
        node |= patch | {key: trainer[key] for key in ("image", "command", "args")}
        node["resources"] = trainer["resourcesPerNode"]
        torchruns = {"NNODES": str(trainer["numNodes"]), "NPROC_PER_NODE": "auto", "MASTER_PORT": "29400"}
        torchruns["MASTER_ADDR"] = f"{name}-node-0-0.{name}"
        node["env"] = [*trainer["env"], *({"name": f"PET_{key}", "value": each} for key, each in torchruns.items())]
        template["spec"] = RUNTIME | template["spec"] | {"containers": [node]}
    return template


def pod_of(resource, index, *, attempt, shared_memory):
    """Pod `index` of the indexed Job that a JobSet's controller makes, at its `attempt`-th start."""
    name, template = resource["metadata"]["name"], template_of(resource)
    meta, spec = template.get("metadata", {}), template["spec"]
    host = f"{name}-node-0-{index}"
    spec |= {"hostname": host, "subdomain": name}
    names = {f"{name}-node-0-{i}.{name}": address_of(i) for i in range(2)} | {host: address_of(index)}
    spec["hostAliases"] = [{"ip": address, "hostnames": [each]} for each, address in names.items()]
    (memory,) = (each for each in spec["volumes"] if each["name"] == "shared-memory")
    assert memory.pop("emptyDir")["medium"] == "Memory"
    memory["hostPath"] = {"path": shared_memory, "type": "Directory"}
    (node,) = spec["containers"]
    node["env"].append(
        {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
    )
    labels = meta.get("labels", {}) | {"jobset.sigs.k8s.io/jobset-name": name, INDEX: str(index)}
    metadata = {"name": f"{host}-try{attempt}", "labels": labels, "annotations": {INDEX: str(index)}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def address_of(index):
    return f"{SUBNET}.{10 + index}"


@contextmanager
def pod_network():
    """A bridge in a namespace of its own, to which pods are joined -> the command that runs podman there."""
    name = f"lockstep-{os.getpid()}-pods"
    subprocess.run(["ip", "netns", "add", name], check=True)
    within = ["nsenter", f"--net=/run/netns/{name}"]
    try:
        podman("network", "create", "--internal", "--subnet", f"{SUBNET}.0/24", NETWORK, within=within)
        yield within
    finally:
        ran("network", "rm", "--force", NETWORK, within=within)
        subprocess.run(["ip", "netns", "del", name], check=True)


class Pods:
    """Those of one manifest, each on a network namespace of its own, with a folder as the volume."""

    def __init__(self, folder, text, within):
        self.folder, self.podman = folder, partial(podman, within=within)
        self.config_map, self.resource = yaml.safe_load_all(text)
        self.attempts, self.played = {}, []
        self.volume, self.shared_memory = folder / "volume", tempfile.mkdtemp(dir="/dev/shm")
        self.volume.mkdir()
        self.spec = template_of(self.resource)["spec"]
        owner = self.spec["securityContext"]["fsGroup"]
        for each in (self.volume, self.shared_memory):
            shutil.chown(each, owner, owner)
        (claim,) = (each["persistentVolumeClaim"] for each in self.spec["volumes"] if each["name"] == "workspace")
        self.claim = claim["claimName"]
        device = f"device={self.volume}"
        self.podman("volume", "create", "--opt", "type=none", "--opt", "o=bind", "--opt", device, self.claim)

    def start(self, index):
        """Start a pod, or the one that replaces it -> its name."""
        attempt = self.attempts[index] = self.attempts.get(index, -1) + 1
        if attempt:  # its controller waits until the old one is gone
            self.podman("pod", "rm", "--force", self.name_of(index, attempt - 1))
        pod = pod_of(self.resource, index, attempt=attempt, shared_memory=self.shared_memory)
        name = pod["metadata"]["name"]
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all([self.config_map, pod]))
        self.podman("kube", "play", "--network", NETWORK, "--ip", address_of(index), file)
        self.played.append(name)
        return name

    def terminate(self, *pods):
        """Stop the containers of pods at the same time, as the kubelet does; their network goes only after them."""
        grace = self.spec["terminationGracePeriodSeconds"]
        self.podman("stop", "--time", grace, *(f"{pod}-node" for pod in pods))

    def name_of(self, index, attempt):
        return f"{self.resource['metadata']['name']}-node-0-{index}-try{attempt}"

    def state(self, pod):
        """Whether the pod's container runs, and its exit code."""
        found = json.loads(podman("container", "inspect", f"{pod}-node"))[0]["State"]
        return found["Running"], found["ExitCode"]

    def wait(self, pod):
        """Wait until a pod has ended -> its exit code."""
        self.until(lambda: not self.state(pod)[0])
        return self.state(pod)[1]

    def until(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.2)

    def logs(self):
        done = [(pod, ran("logs", f"{pod}-node")) for pod in self.played]
        return "\n".join(f"== {pod}\n{each.stdout}{each.stderr}" for pod, each in done)

    def close(self):
        for pod in self.played:
            self.podman("pod", "rm", "--force", "--ignore", "--time", "0", pod)
        self.podman("volume", "rm", "--force", self.claim)
        shutil.rmtree(self.shared_memory)
