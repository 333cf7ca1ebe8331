"""What a cluster gets: manifests as they were approved, read by two strict readers.

After a change that is meant, `LOCKSTEP_GOLDEN=write pytest tests/unit/launch/test_kubernetes.py` writes the approved manifests anew.
"""

import copy
import json
import re

import jsonschema
import pytest
import yaml
from golden import matches
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from manifests import LEAST, SCHEMAS, complaints, documents, launcher, manifest, pod_of, request_in
from places import ROOT
from pydantic import ValidationError
from typer.testing import CliRunner

from lockstep.base.errors import LaunchError
from lockstep.cli import _app
from lockstep.launch.launchers import _kubernetes_manifest as manifests
from lockstep.launch.launchers.kubernetes import Config

EVERYTHING = {
    **LEAST,
    "name": "digits",
    "nodes": "1:2",
    "namespace": "research",
    "context": "big",
    "mount": "/data/run",
    "gpus": 8,
    "cpus": 64,
    "memory": "512Gi",
    "shared_memory": "64Gi",
    "port": 29500,
    "user": 4000,
    "pod_restarts": 10,
    "grace_seconds": 600,
    "interface": "eth0",
    "debug": True,
    "environment": {"NCCL_IB_DISABLE": "1", "AT": "1:30"},
    "extra": {
        "metadata": {"annotations": {"example.org/rdma": "on"}},
        "spec": {
            "serviceAccountName": "trainer",
            "imagePullSecrets": [{"name": "registry"}],
            "nodeSelector": {"pool": "h100", "spot": "y"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "volumes": [{"name": "shared-memory", "emptyDir": {"sizeLimit": "32Gi"}}, {"name": "raw", "emptyDir": {}}],
            "containers": [{"name": "node", "volumeMounts": [{"name": "raw", "mountPath": "/raw"}]}],
        },
    },
}
GOLDEN = {
    "jobset-one.yaml": LEAST,
    "jobset-everything.yaml": {
        **EVERYTHING,
        "extra": {
            **EVERYTHING["extra"],
            "spec": {**EVERYTHING["extra"]["spec"], "priorityClassName": "high", "automountServiceAccountToken": True},
        },
    },
    "trainjob.yaml": {**LEAST, "resource": "trainjob", "nodes": 2, "gpus": 1, "runtime": "torch-large"},
    "trainjob-everything.yaml": {**EVERYTHING, "resource": "trainjob"},
}


# ---- what is written


@pytest.mark.parametrize("name", GOLDEN)
def test_manifest_is_the_approved_one(tmp_path, monkeypatch, name):
    assert matches(manifest(tmp_path, monkeypatch, **GOLDEN[name]), f"kubernetes/{name}")


@pytest.mark.parametrize("name", GOLDEN)
def test_manifest_follows_the_schema(tmp_path, monkeypatch, name):
    config_map, resource = documents(tmp_path, monkeypatch, **GOLDEN[name])
    assert complaints(config_map) == []
    assert complaints(resource) == []


def test_schemas_are_schemas_and_say_where_they_come_from():
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "https://" in schema["$comment"]


def lacking(wanted, found, path=()):
    """Where something that is wanted is not found."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            yield from lacking(value, found[key], (*path, key)) if key in found else [(*path, key)]
    elif isinstance(wanted, list):
        assert len(wanted) == len(found), path
        for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from lacking(one, other, (*path, i))
    elif wanted != found:
        yield path


@pytest.mark.parametrize("name", GOLDEN)
def test_kubeflows_own_models_read_every_field(tmp_path, monkeypatch, name):
    """Models made from the published OpenAPI: they drop what they do not know, so all that was written must come back."""
    resource = documents(tmp_path, monkeypatch, **GOLDEN[name])[1]
    model = {"JobSet": JobsetV1alpha2JobSet, "TrainJob": TrainerV1alpha1TrainJob}[resource["kind"]]
    assert list(lacking(resource, model.from_dict(resource).to_dict())) == []


def pod(document):
    if document["kind"] == "JobSet":
        return pod_of(document)
    patch = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
    return patch["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def job(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


MISTAKES = {
    "misspelt in a JobSet": ("jobset-one.yaml", lambda d: d["spec"].update(failurePolicies={})),
    "misspelt in a Job": ("jobset-one.yaml", lambda d: job(d).update(backOffLimit=1)),
    "misspelt in a pod": ("jobset-one.yaml", lambda d: pod(d).update(nodeSelectors={})),
    "misspelt in a container": ("jobset-one.yaml", lambda d: pod(d)["containers"][0].update(volumes=[])),
    "misspelt in a TrainJob": ("trainjob.yaml", lambda d: d["spec"]["trainer"].update(nodes=2)),
    "what a patch may not change": ("trainjob.yaml", lambda d: pod(d).update(restartPolicy="Never")),
    "variables outside of the trainer": ("trainjob.yaml", lambda d: pod(d)["containers"][0].update(env=[])),
    "a variable that is torchrun's": (
        "trainjob.yaml",
        lambda d: d["spec"]["trainer"]["env"].append({"name": "PET_NNODES"}),
    ),
    "no image": ("jobset-one.yaml", lambda d: pod(d)["containers"][0].pop("image")),
    "no runtime": ("trainjob.yaml", lambda d: d["spec"].pop("runtimeRef")),
    "no name": ("jobset-one.yaml", lambda d: d["metadata"].pop("name")),
    "no status of a condition": (
        "jobset-one.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][1]["onPodConditions"][0].pop("status"),
    ),
    "text for a number": ("jobset-one.yaml", lambda d: job(d).update(completions="2")),
    "number for a text": ("jobset-one.yaml", lambda d: pod(d)["containers"][0]["env"][0].update(value=1)),
    "one for a list": ("jobset-one.yaml", lambda d: pod(d)["containers"][0].update(command="sh")),
    "an unknown word": ("jobset-one.yaml", lambda d: d["spec"]["failurePolicy"].update(restartStrategy="Gently")),
    "an unknown reason": (
        "jobset-one.yaml",
        lambda d: d["spec"]["failurePolicy"]["rules"][0].update(onJobFailureReasons=["Tired"]),
    ),
    "capitals in a name": ("jobset-one.yaml", lambda d: d["metadata"].update(name="Digits")),
    "a digit before a service": ("jobset-one.yaml", lambda d: d["spec"]["network"].update(subdomain="1st")),
    "a size in words": ("jobset-one.yaml", lambda d: pod(d)["volumes"][2]["emptyDir"].update(sizeLimit="2 GB")),
    "restarts in place": ("jobset-one.yaml", lambda d: pod(d).update(restartPolicy="OnFailure")),
    "success of what is not indexed": ("jobset-one.yaml", lambda d: job(d).update(completionMode="NonIndexed")),
    "a rule for two things": (
        "jobset-one.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][0].update(onPodConditions=[]),
    ),
    "a volume of two kinds": ("jobset-one.yaml", lambda d: pod(d)["volumes"][0].update(emptyDir={})),
    "another version": ("jobset-one.yaml", lambda d: d.update(apiVersion="jobset.x-k8s.io/v1")),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_schema_refuses(tmp_path, monkeypatch, case):
    name, spoil = MISTAKES[case]
    resource = documents(tmp_path, monkeypatch, **GOLDEN[name])[1]
    assert complaints(resource) == []
    spoilt = copy.deepcopy(resource)
    spoil(spoilt)
    assert complaints(spoilt) != []


# ---- what is meant by it


def test_grace_is_longer_than_that_of_lockstep(tmp_path, monkeypatch):
    for resource in ("jobset", "trainjob"):
        found = documents(tmp_path, monkeypatch, **LEAST, resource=resource, grace_seconds=77)[1]
        assert pod(found)["terminationGracePeriodSeconds"] == 77 + manifests.MARGIN_SECONDS


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({"cpus": 7}, 3),
        ({"cpus": 1}, 1),
        ({"cpus": 64, "nodes": 4}, 4),
        ({"gpus": 8, "cpus": 2}, 8),
        ({"gpus": 8, "processes": 2}, 2),
        ({"processes": 5}, 5),
    ],
)
def test_pods_are_told_how_many_processes_they_run(tmp_path, monkeypatch, settings, processes):
    """2 threads each, 16 shards in a step."""
    config_map, _ = documents(tmp_path, monkeypatch, **LEAST, **settings)
    assert yaml.safe_load(config_map["data"]["launch.yaml"])["launch"]["processes"] == processes


def test_paths_of_the_config_are_those_of_the_volume(tmp_path, monkeypatch):
    text = (
        f"run: {{dir: {tmp_path}/out/runs}}\n"
        f"model: {{kind: user, file: {tmp_path}/my_model.py}}\n"
        f"data: {{train: /elsewhere/train.csv, test: {tmp_path}-not/test.csv, cache: /root/.cache}}\n"
        "train: {lr: 1e-05}\n"
    )
    monkeypatch.chdir(tmp_path)
    section = Config(kind="kubernetes", **LEAST)
    moved = manifests.relocate(text, tmp_path, section, name="x")
    assert moved == {
        "run": {"dir": "/workspace/out/runs"},
        "model": {"kind": "user", "file": "/workspace/my_model.py"},
        "data": {
            "train": "/elsewhere/train.csv",
            "test": f"{tmp_path}-not/test.csv",
            "cache": "/workspace/.cache/lockstep",
        },
        "train": {"lr": 1e-05},
        "launch": {"name": "x"},
    }
    there = manifests.relocate("run: {dir: /workspace/a}\n", tmp_path, section)
    elsewhere = manifests.relocate("run: {dir: /scratch/a}\n", tmp_path, section)
    assert (there["run"]["dir"], elsewhere["run"]["dir"]) == ("/workspace/a", "/workspace/runs")


@given(st.from_regex(r"[\w-][\w.-]*", fullmatch=True), st.from_regex(r"[\w-][\w.-]*", fullmatch=True))
def test_every_run_has_a_valid_name_of_its_own(one, other):
    name = manifests.job_name(one)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-node-0-9999-abcde") <= 63
    assert one == other or name != manifests.job_name(other)
    if manifests.is_label(one):
        assert name == one
    Config(kind="kubernetes", **LEAST, name=name)


@pytest.mark.parametrize(
    "text",
    ["y", "N", "on", "no", "1:30", "0o17", "017", "0x1F", "1e3", "1_000", "~", "null", "2026-01-01", ".5", "", "="],
)
def test_text_stays_text_for_every_reader(text):
    """Go's readers of YAML and Python's take different words for switches and numbers."""
    assert yaml.dump({"a": text}, Dumper=manifests.ManifestDumper) in (f"a: '{text}'\n", f'a: "{text}"\n')


def test_text_of_several_lines_is_written_as_it_is():
    text = "a: 1\n\n  b: [x]\n# c\n"
    written = yaml.dump({"a": text}, Dumper=manifests.ManifestDumper)
    assert written == "a: |\n  a: 1\n\n    b: [x]\n  # c\n"
    for odd in (text, "a \nb", "a\u2028\nb", "\ta\n", "\n", "  a\nb\n\n"):
        assert yaml.safe_load(yaml.dump([odd], Dumper=manifests.ManifestDumper)) == [odd]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "My_Job"}, "pattern"),
        ({"name": "x" * 46}, "at most 45"),
        ({"memory": "16GB"}, "pattern"),
        ({"memory": "1Gi", "shared_memory": "1Gi"}, "less than launch.memory"),
        ({"mount": "data"}, "absolute folder"),
        ({"mount": "/a/../b"}, "absolute folder"),
        ({"extra": {"containers": []}}, "put it under spec"),
        ({"resource": "job"}, "'jobset' or 'trainjob'"),
        ({"user": 0}, "greater than or equal to 1"),
    ],
)
def test_mistakes_in_the_section_are_told(settings, said):
    with pytest.raises(ValidationError, match=said):
        Config(kind="kubernetes", **{**LEAST, **settings})


def test_what_cannot_be_started_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match="set launch.processes=2"):
        launcher(**LEAST, gpus=2, processes=3).plan(request_in(tmp_path))
    for resume in ("never", "runs/other"):
        with pytest.raises(LaunchError, match="choose a new run.name"):
            launcher(**LEAST).plan(request_in(tmp_path, arguments=("--resume", resume, "--allow-drift")))


def test_the_page_shows_configs_that_are_ones(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    claim, recipe = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert yaml.safe_load(claim)["kind"] == "PersistentVolumeClaim"
    (tmp_path / "big.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"^lockstep (train .*--dry-run)", page, re.MULTILINE)
    shown = CliRunner().invoke(_app.app, [*command.split(), "launch.extra.spec.priorityClassName=high"])
    assert shown.exit_code == 0, shown.output
    assert "priorityClassName: high" in shown.stdout and "jobset" in shown.stdout.lower()
    settings = set(re.findall(r"`launch\.(\w+)", page))
    assert settings <= set(Config.model_fields)
