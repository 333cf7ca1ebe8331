"""The command of a pod, in a real shell: two of them find each other and train."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import yaml
from manifests import LEAST, complaints, documents, pod_of
from typer.testing import CliRunner

from lockstep.cli import _app
from lockstep.launch.launchers import _kubernetes_manifest as manifests


def started(resource, folder, index, port_host="127.0.0.1"):
    """A pod's command on this machine: its name is an address, its recipe lies in a folder, `lockstep` is ours."""
    container = pod_of(resource)["containers"][0]
    name = resource["metadata"]["name"]
    script = (
        container["args"][0]
        .replace(f"{name}-node-0-0.{name}", port_host)
        .replace(f"{name}-node-0-0", port_host)
        .replace(manifests.RECIPES, str(folder / "etc"))
    )
    command = folder / "bin" / "lockstep"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lockstep "$@"\n')
    command.chmod(0o755)
    own = {each["name"]: each["value"] for each in container["env"]}
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [*container["command"], script],
        env={**os.environ, **own, "PATH": path, "JOB_COMPLETION_INDEX": str(index)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_pods_train_by_the_command_of_the_manifest(tmp_path, monkeypatch, free_port):
    """`--dry-run` from the command line; then what it printed, run twice beside each other."""
    volume = tmp_path / "volume"
    volume.mkdir()
    (tmp_path / "c.yaml").write_text(
        "data: {kind: digits, limit: 100}\ntrain: {steps: 3, global_batch: 16, micro_batch: 4}\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = {
        **LEAST,
        "kind": "kubernetes",
        "nodes": 2,
        "cpus": 1,
        "port": free_port,
        "mount": volume,
        "join_timeout_seconds": 60,
    }
    overrides = [f"launch.{key}={value}" for key, value in settings.items()]
    shown = CliRunner().invoke(_app.app, ["train", "c.yaml", "run.name=Two_pods", *overrides, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    text = shown.stdout.partition("kubernetes.yaml\n\n# ")[2].partition(f"\n# {tmp_path}/runs/Two_pods/launch.yaml\n")[
        0
    ]
    config_map, resource = yaml.safe_load_all(f"# {text}")
    assert [complaints(config_map), complaints(resource)] == [[], []]
    (tmp_path / "etc").mkdir()
    for name, content in config_map["data"].items():
        (tmp_path / "etc" / name).write_text(content)
    pods = [started(resource, tmp_path, index) for index in (0, 1)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in pods]
    finally:
        for process in pods:
            process.kill()
            process.wait()
    assert [process.returncode for process in pods] == [0, 0], "\n".join(outputs)
    summary = json.loads((volume / "runs" / "Two_pods" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"]) == (3, 2)
    noted = json.loads((volume / "runs" / "Two_pods" / "job.json").read_text())
    assert (noted["kind"], noted["resource"], noted["name"]) == ("kubernetes", "jobset", resource["metadata"]["name"])


def test_a_pod_that_waits_for_the_first_one_can_be_ended(tmp_path, monkeypatch):
    resource = documents(tmp_path, monkeypatch, **LEAST, mount=str(tmp_path))[1]
    process = started(resource, tmp_path, 1, "nobody.invalid")
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


def test_each_pod_calls_the_first_one_by_a_name_that_is_surely_right(tmp_path, monkeypatch):
    """Pod 0 by its own /etc/hosts, which knows no stale address; the others by DNS, in which bare names are not."""
    script = pod_of(documents(tmp_path, monkeypatch, **LEAST, nodes=3)[1])["containers"][0]["args"][0]
    choice = next(line for line in script.splitlines() if line.startswith("if "))
    for index, name in enumerate(["digits-node-0-0", "digits-node-0-0.digits", "digits-node-0-0.digits"]):
        run = ["sh", "-euc", f'{choice}; echo "$first"']
        done = subprocess.run(run, env={"JOB_COMPLETION_INDEX": str(index)}, capture_output=True, text=True, check=True)
        assert done.stdout == f"{name}\n"
