"""Kubernetes manifests that are checked against schemas."""

import functools
import json

import jsonschema
import yaml
from places import SUPPORT
from referencing import Registry, Resource

from lockstep.base.contracts import Request
from lockstep.launch.launchers.kubernetes import Config, build

SCHEMAS = SUPPORT / "schemas"
LEAST = {"image": "registry.example/lockstep:1", "volume": "shared"}


def launcher(**settings):
    return build(Config(kind="kubernetes", **settings), threads=2, shards=16)


def request_in(folder, run="digits", text=None, arguments=("--resume", "auto")):
    text = (
        f"data: {{kind: mnist, root: {folder}/data, cache: /home/me/.cache}}\nrun: {{dir: {folder}/runs}}\n"
        if text is None
        else text
    )
    return Request(recipe=folder / "runs" / run / "launch.yaml", text=text, arguments=arguments)


def manifest(folder, monkeypatch, run="digits", **settings):
    """The text of a manifest, as written from a folder."""
    monkeypatch.chdir(folder)
    (text,) = launcher(**settings).plan(request_in(folder, run)).files.values()
    return text


def documents(folder, monkeypatch, **settings):
    return list(yaml.safe_load_all(manifest(folder, monkeypatch, **settings)))


def pod_of(resource):
    return resource["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@functools.cache
def validator(kind):
    found = {path.name: Resource.from_contents(json.loads(path.read_text())) for path in SCHEMAS.glob("*.json")}
    registry = Registry().with_resources(found.items())
    reference = {"ConfigMap": "core.json#/$defs/ConfigMap", "JobSet": "jobset.json", "TrainJob": "trainjob.json"}[kind]
    return jsonschema.Draft202012Validator({"$ref": reference}, registry=registry)


def complaints(document):
    """What the schema has against a document."""
    return [error.message for error in validator(document["kind"]).iter_errors(document)]
