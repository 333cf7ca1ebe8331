"""What kubectl is asked, what it says when it cannot, and how a cluster's answer is shown."""

import json
import shutil
from datetime import UTC, datetime

import pytest
import yaml
from manifests import LEAST, complaints, launcher
from typer.testing import CliRunner

from lockstep.base.errors import LaunchError
from lockstep.cli import _app
from lockstep.launch.launchers.kubernetes import state_of


def submit(folder, *overrides):
    (folder / "c.yaml").write_text("data: {kind: digits}\n")
    settings = [f"launch.{key}={value}" for key, value in LEAST.items()]
    arguments = ["train", "c.yaml", "run.name=a", "launch.kind=kubernetes", *settings, *overrides]
    return CliRunner().invoke(_app.app, arguments)


def test_without_kubectl_the_manifest_is_written_and_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit(tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "there is no kubectl" in done.stderr and "--dry-run" in done.stderr
    written = list(yaml.safe_load_all((tmp_path / "runs" / "a" / "kubernetes.yaml").read_text()))
    assert [complaints(document) for document in written] == [[], []]
    note = json.loads((tmp_path / "runs" / "a" / "job.json").read_text())
    for ask in (launcher(**LEAST).status, launcher(**LEAST).cancel):
        with pytest.raises(LaunchError, match="there is no kubectl"):
            ask(note)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_what_kubectl_says_is_repeated(tmp_path, monkeypatch, free_port):
    """A cluster that does not answer, and one that kubectl has never heard of."""
    monkeypatch.chdir(tmp_path)
    cluster = {"clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{free_port}"}}]}
    contexts = {"contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "current-context": "c"}
    users = {"users": [{"name": "u", "user": {"token": "t"}}]}
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **cluster, **contexts, **users}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    done = submit(tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "kubectl get jobsets.jobset.x-k8s.io a " in done.stderr
    assert "refused" in done.stderr and "kubectl cluster-info" in done.stderr
    done = submit(tmp_path, "launch.context=nowhere", "launch.namespace=there")
    assert "kubectl --context nowhere --namespace there get" in done.stderr
    assert '"nowhere" does not exist' in done.stderr and "get-contexts" in done.stderr


BEGAN = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
READY = {
    "replicatedJobsStatus": [{"name": "node", "ready": 1, "active": 1, "failed": 0, "succeeded": 0, "suspended": 0}]
}
STATES = {
    "new": ({}, "waits for pods (submitted 95 h 3 min ago)", False),
    "runs": ({"status": {**READY, "restarts": 2}}, "runs (2 restarts, submitted 95 h 3 min ago)", False),
    "trainjob runs": ({"status": {"jobsStatus": [{"name": "node", "ready": 1}]}}, "runs (submitted", False),
    "queued": ({"spec": {"suspend": True}, "status": {}}, "is suspended or queued (", False),
    "completed": ({"status": {"conditions": [{"type": "Completed", "status": "True"}]}}, "has completed (", True),
    "trainjob complete": (
        {"status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        "has completed (",
        True,
    ),
    "not yet": ({"status": {**READY, "conditions": [{"type": "Completed", "status": "False"}]}}, "runs (", False),
    "failed": (
        {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "pod 0"}]}},
        "has failed (FailedJobs: pod 0; submitted",
        True,
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_state_of_a_job_in_words(case):
    found, text, has_ended = STATES[case]
    told, is_over = state_of({**BEGAN, **found}, datetime(2026, 1, 4, 23, 3, 59, tzinfo=UTC))
    assert told.startswith(text)
    assert is_over == has_ended
