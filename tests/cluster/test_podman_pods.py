"""The pods of a JobSet and of a TrainJob, run by podman with the image, each on a network of its own: the bits of this
machine, through a kill and a termination."""

import json

import pytest
import warm
from containers import built, why_not
from pods import Pods, pod_network
from typer.testing import CliRunner

from lockstep.cli import _app

pytestmark = [
    pytest.mark.images,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
CONFIG = """\
data: {kind: digits, limit: 200}
train: {steps: 200, global_batch: 16, micro_batch: 4}
checkpoint: {every_steps: 50}
"""
LAUNCH = {
    "kind": "kubernetes",
    "image": "localhost/lockstep",
    "volume": "shared",
    "processes": 1,
    "cpus": 1,
    "memory": "4Gi",
    "shared_memory": "1Gi",
    "join_timeout_seconds": 300,
}


@pytest.fixture(scope="module")
def image():
    built()


@pytest.fixture
def pods(tmp_path, monkeypatch, image):
    """Make the pods of a manifest, written from the command line with some settings."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    made = []
    with pod_network() as within:

        def make(**settings):
            words = [f"launch.{key}={value}" for key, value in {**LAUNCH, **settings}.items()]
            shown = CliRunner().invoke(_app.app, ["train", "c.yaml", "run.name=pods", *words, "--dry-run"])
            assert shown.exit_code == 0, shown.output
            text = shown.stdout.partition("kubernetes.yaml\n\n# ")[2]
            text = text.partition(f"\n# {tmp_path}/runs/pods/launch.yaml\n")[0]
            made.append(Pods(tmp_path, f"# {text}", within))
            return made[-1]

        try:
            yield make
        finally:
            for each in made:
                each.close()


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """Of one process of this machine."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "c.yaml").write_text(CONFIG)
    done = warm.run(["lockstep", "train", "c.yaml", "run.name=pods", "launch.processes=1"], cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder)["digest"]


def summary(volume):
    return json.loads((volume / "runs" / "pods" / "summary.json").read_text())


def steps(pods):
    metrics = pods.volume / "runs" / "pods" / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def checkpoints(pods):
    return [*(pods.volume / "runs" / "pods" / "checkpoints").glob("step-*/manifest.json")]


@pytest.mark.parametrize("resource", ["jobset", "trainjob"])
def test_two_pods_give_the_bits_of_this_machine(pods, digest, resource):
    two = pods(resource=resource, nodes=2)
    names = [two.start(index) for index in (0, 1)]
    assert [two.wait(name) for name in names] == [0, 0], two.logs()
    found = summary(two.volume)
    assert (found["world_size"], found["digest"]) == (2, digest)


def test_a_pod_that_is_killed_and_replaced_joins_again(pods, digest):
    """As after the loss of a machine: the other notices it and waits, and both go on from the newest checkpoint."""
    two = pods(nodes=2, failure_timeout_seconds=3)
    first, second = two.start(0), two.start(1)
    two.until(lambda: checkpoints(two))
    two.podman("pod", "kill", second)
    assert two.wait(second) == 137
    replaced = two.start(1)
    assert [two.wait(name) for name in (first, replaced)] == [0, 0], two.logs()
    assert "has sent no heartbeat" in two.logs()
    assert summary(two.volume)["digest"] == digest


def test_pods_that_are_terminated_save_within_their_grace_period(pods, digest):
    """SIGTERM as the kubelet sends it: exit code 75, which the Job ignores; the pods that replace them go on."""
    two = pods(nodes=2)
    names = [two.start(index) for index in (0, 1)]
    two.until(lambda: checkpoints(two))
    two.terminate(*names)
    assert [two.wait(name) for name in names] == [75, 75], two.logs()
    saved = max(int(path.parent.name.removeprefix("step-")) for path in checkpoints(two))
    assert saved % 50, "the checkpoint is that of the step at which it stopped"
    names = [two.start(index) for index in (0, 1)]
    assert [two.wait(name) for name in names] == [0, 0], two.logs()
    assert f"resumed after step {saved}" in two.logs()
    assert summary(two.volume)["digest"] == digest
