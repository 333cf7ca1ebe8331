"""The Kubernetes manifest of a run: a ConfigMap with the recipe, and a JobSet or a TrainJob."""

import hashlib
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from lockstep.base.contracts import Request
from lockstep.base.errors import CheckpointError, Desync, Interrupted, NonFiniteLoss
from lockstep.base.json_values import with_texts
from lockstep.base.yaml_text import BREAKS, YamlDumper, YamlLoader
from lockstep.launch.launchers._kubernetes_config import LABEL, LONGEST_NAME, Config

RECIPES = "/etc/lockstep"
"""Mount path of the ConfigMap in pods."""
MARGIN_SECONDS = 30
"""Added to launch.grace_seconds for the pods' grace period: nodes notify each other before they leave."""
FINAL = sorted({CheckpointError.exit_code, NonFiniteLoss.exit_code, Desync.exit_code})
"""Exit codes that any further start would end with, too."""
OF_THE_RUNTIME = {"restartPolicy", "automountServiceAccountToken", "enableServiceLinks"}
"""Fields of a pod that a TrainJob's patch may not set."""
Values = dict[str, Any]
"""A YAML mapping."""


def is_label(text: str) -> bool:
    """Return whether a text is valid as a job's name."""
    return len(text) <= LONGEST_NAME and re.fullmatch(LABEL, text) is not None


def job_name(run: str) -> str:
    """Return a valid Kubernetes name for a run: its own, or one with a digest, so that two runs never share one."""
    if is_label(run):
        return run
    digest = hashlib.sha256(run.encode()).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"run-{plain}"
    return f"{plain[: LONGEST_NAME - len(digest) - 1].strip('-')}-{digest}"


def manifest(section: Config, request: Request, *, name: str, recipe: Values, threads: int) -> str:
    """Render the manifest; `recipe` is the config with paths as pods see them, `threads` the number per process."""
    from lockstep.base.templates import render  # noqa: PLC0415 (a config is checked without Jinja2)

    run = request.folder.name
    logs = Path(recipe["run"]["dir"], run, "logs")
    script = render(
        "launch/launchers/pod.sh.j2",
        job=name,
        mount=section.mount,
        port=section.port,
        command=shlex.join(["lockstep", "train", f"{RECIPES}/{request.recipe.name}", *request.arguments]),
        interrupted=Interrupted.exit_code,
        quote=shlex.quote,
    )
    labels = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": name}
    scope = {"namespace": section.namespace} if section.namespace else {}
    text = render(
        "launch/launchers/pod.yaml.j2",
        section=section,
        job=name,
        labels=labels,
        metadata=lambda of: {"name": of, **scope, "labels": labels, "annotations": {"lockstep/run": run}},
        file=request.recipe.name,
        recipe=yaml.dump(recipe, Dumper=YamlDumper, sort_keys=False, allow_unicode=True),
        recipes=RECIPES,
        script=script,
        variables={"HF_HOME": f"{section.mount}/.cache/huggingface"} | section.variables(threads=threads, logs=logs),
        grace_seconds=section.grace_seconds + MARGIN_SECONDS,
        final_codes=FINAL,
        interrupted=Interrupted.exit_code,
        yaml=_quoted,
    )
    config_map, pod, resource = yaml.safe_load_all(text)
    _fill(resource, pod, section.extra)
    header = (
        f"# Lockstep run {run}. Written by `lockstep train`, which overwrites it.\n"
        "# By hand: kubectl apply -f THIS_FILE. To stop the run, with a checkpoint: kubectl delete -f THIS_FILE.\n"
    )
    return header + yaml.dump_all([config_map, resource], Dumper=ManifestDumper, sort_keys=False, allow_unicode=True)


def _quoted(value: Any) -> str:
    """Format a value as YAML on one line, every scalar in double quotes with escapes, so that no text can end it."""
    text = yaml.dump(
        value, Dumper=yaml.SafeDumper, default_style='"', default_flow_style=True, width=float("inf"), sort_keys=False
    )
    return text.rstrip("\n")


def _fill(resource: Values, pod: Values, extra: Values) -> None:
    """Put the pod template, with what a user adds to it, into a JobSet, or into a TrainJob's trainer and patch."""
    spec = resource["spec"]
    if resource["kind"] == "TrainJob":
        pod["spec"] = {name: value for name, value in pod["spec"].items() if name not in OF_THE_RUNTIME}
    pod = merge(pod, extra)
    if resource["kind"] == "TrainJob":
        node = pod["spec"]["containers"][0]
        spec["trainer"] |= {name: node.pop(name) for name in ("image", "command", "args", "env")}
        spec["trainer"]["resourcesPerNode"] = node.pop("resources")
        spec = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    spec["replicatedJobs"][0]["template"]["spec"]["template"] = pod


class ManifestDumper(YamlDumper):
    """YAML for people and for Go: block style for multi-line text, no aliases, and quotes around what Go's YAML reader
    takes for a bool or an int and Python's does not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    if "\n" in text and not set(text) & set(BREAKS):
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    return YamlDumper.yaml_representers[str](dumper, text)


ManifestDumper.add_representer(str, _represent_text)
ManifestDumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"[yYnN]$"), list("yYnN"))
ManifestDumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0[oO][0-7]+$"), list("-+0"))


def relocate(text: str, here: Path, section: Config, **launch: Any) -> Values:
    """Return a recipe as pods see it: paths below `here` are in the volume, as are the folder of runs and the cache."""
    prefix = str(here).rstrip("/")

    def moved(value: str) -> str:
        is_below = value and f"{value}/".startswith(f"{prefix}/")
        return section.mount + value.removeprefix(prefix) if is_below else value

    recipe: Values = with_texts(yaml.load(text, Loader=YamlLoader) or {}, moved)
    for name, key, default in (("run", "dir", "runs"), ("data", "cache", ".cache/lockstep")):
        folder = str(recipe.get(name, {}).get(key, ""))
        if key == "dir" or folder:
            is_in_volume = folder.startswith(f"{section.mount}/")
            recipe.setdefault(name, {})[key] = folder if is_in_volume else f"{section.mount}/{default}"
    recipe["launch"] = {**recipe.get("launch", {}), **launch}
    return recipe


def merge(base: Any, extra: Any) -> Any:
    """Merge strategically: mappings by key, lists by the items' mountPath or name; else `extra` replaces `base`."""
    if isinstance(base, list) and isinstance(extra, list):
        return list(merge(*({_merge_key(item): item for item in items} for items in (base, extra))).values())
    if not (isinstance(base, dict) and isinstance(extra, dict)):
        return extra
    return base | {key: merge(base[key], value) if key in base else value for key, value in extra.items()}


def _merge_key(item: Any) -> str:
    return str((item.get("mountPath") or item.get("name") or item) if isinstance(item, dict) else item)
