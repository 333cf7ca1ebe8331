"""Ray jobs: submitted with the config and the user's code through Ray's Jobs API; see launch/ray_driver.py."""

import json
import logging
import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from lockstep.base import config as configs
from lockstep.base import plugins, world
from lockstep.base.config import MANY
from lockstep.base.contracts import Plan, Request
from lockstep.base.errors import LaunchError, few
from lockstep.base.json_values import with_texts
from lockstep.base.yaml_text import YamlDumper
from lockstep.launch.launch_config import JobSection, submission
from lockstep.recipe.recipe import Recipe
from lockstep.recipe.recipe_trust import code_of_files

SENT = "ray"
"""Folder in the run's folder with what is sent to the machines: the config and the user's code."""
MOST_SENT_BYTES = 32 << 20
MARGIN_SECONDS = 30
"""Seconds added to launch.grace_seconds: Ray's time limit for a stopped job to end."""
ADDRESS = "RAY_API_SERVER_ADDRESS"
"""Variable that overrides all other addresses of the Jobs API."""


class Config(JobSection):
    """Machines of a Ray cluster, taken by a Ray job, which waits for them and starts again where too few are left."""

    address: str | None = None
    """The cluster: http://HEAD:8265, or HEAD:6379; by default RAY_ADDRESS, or the one that this machine belongs to."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Further resources per machine, by Ray's names: {memory: 64e9, "accelerator_type:A100": 0.001}."""
    placement: Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"] = "STRICT_SPREAD"
    """Ray's strategy for the bundles of resources, one for each of launch.nodes; STRICT_SPREAD: on as many machines."""
    python: str = "python"
    """Python on the cluster's machines, with Lockstep and Ray in it."""
    runtime_env: dict[str, Any] = {}
    """Further fields of the job's runtime environment: {pip: [lockstep-train]}."""
    restarts: int = Field(100, ge=0, le=MANY)
    """How often the run starts again, from its newest checkpoint, after too few machines were left, or preemption."""
    join_timeout_seconds: float = Field(1800.0, gt=0, le=MANY)
    """How long the job waits for machines that the cluster does not have, such as an autoscaler's; and the rendezvous
    for all machines."""

    @field_validator("runtime_env")
    @classmethod
    def _leaves_the_folder(cls, runtime_env: dict[str, Any]) -> dict[str, Any]:
        if "working_dir" in runtime_env:
            raise ValueError("leave out working_dir: it is the folder with the config and the code that it names")
        return runtime_env


class Note(BaseModel):
    """Record of a Ray job in job.json in the run's folder."""

    model_config = ConfigDict(strict=True)

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=512)
    address: str = Field(pattern=r"^[a-z+]+://", max_length=1024)


class RayJobs:
    """Submits runs to a Ray cluster and queries them."""

    def __init__(self, config: Config, *, threads: int, shards: int) -> None:
        self.config, self.threads, self.shards = config, threads, shards
        self.job = self.address = ""
        self.code: dict[Path, Path] = {}
        """User's file -> its place in the folder that is sent."""

    def plan(self, request: Request) -> Plan:
        """Plan the config as the machines see it, and the command that submits the job."""
        sent, cores = request.folder / SENT, self.config.cpus_of(self.threads)
        processes = self.config.processes_with(
            gpus=self.config.gpus, cores=cores, threads=self.threads, shards=self.shards
        )
        plain_name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.folder.name).strip("-._") or "run"
        self.job = f"{plain_name[:100]}-{secrets.token_hex(4)}"
        output = self.output({"job": self.job}, request.folder / "logs")
        words = ("train", request.recipe.name, *request.arguments)
        driver = _driver(self.config, self.threads, words, output=str(output))
        address = ("--address", self.config.address) if self.config.address else ()
        options = ("--submission-id", self.job, "--working-dir", str(sent))
        environment = json.dumps(_runtime_env(self.config))
        return Plan(
            argv=("ray", "job", "submit", *address, *options, "--runtime-env-json", environment, "--", *driver),
            processes=processes,
            environment=self.config.variables(threads=self.threads, logs=request.folder / "logs"),
            files={sent / request.recipe.name: self._sent_recipe(request, processes)},
        )

    def _sent_recipe(self, request: Request, processes: int) -> str:
        """Return the config with the user's code at its place in the run's folder, and note which files that are."""
        recipe = configs.parse(Recipe, request.text, file=str(request.recipe))
        codes = [code for code in code_of_files(recipe) if code.folder is not None]
        folders = [*dict.fromkeys(code.folder for code in codes)]
        for code in codes:
            place = os.path.relpath(code.name, code.folder)
            if place.startswith(os.pardir):
                raise LaunchError(f"{code.name} is imported, but does not lie below {code.folder}: move it there")
            self.code[Path(code.name)] = Path("code", str(folders.index(code.folder)), place)
        moved = {str(file): str(request.folder / SENT / place) for file, place in self.code.items()}
        values = with_texts(recipe.model_dump(mode="json"), lambda text: moved.get(text, text))
        values["launch"]["processes"] = processes
        return yaml.dump(values, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)

    def run(self, plan: Plan, logs: Path) -> int:
        """Submit the job; returns 0. Raises LaunchError."""
        client, sent = connected(self.config.address), logs.parent / SENT
        said = self._collect(sent)
        entrypoint = f"exec {shlex.join(plan.argv[plan.argv.index('--') + 1 :])}"
        environment = {**_runtime_env(self.config), "working_dir": str(sent)}
        _answer(client.submit_job, entrypoint=entrypoint, submission_id=self.job, runtime_env=environment)
        self.address = client.get_address()
        sys.stdout.write(submission(f"Ray job {self.job} to {self.address}, with {said}", logs.parent))
        return 0

    def _collect(self, sent: Path) -> str:
        """Copy the user's code into the folder that is sent -> a phrase on what that contains. Raises LaunchError."""
        contents = {place: file.read_bytes() for file, place in self.code.items()}
        size = sum(map(len, contents.values()))
        if size > MOST_SENT_BYTES:
            largest = max(self.code, key=lambda file: len(contents[self.code[file]]))
            raise LaunchError(
                f"the code of the recipe is {size / 2**20:.0f} MiB, of which at most {MOST_SENT_BYTES >> 20} are sent "
                f"to a Ray cluster: install {largest} on its machines instead"
            )
        shutil.rmtree(sent / "code", ignore_errors=True)
        for place, content in contents.items():
            (sent / place).parent.mkdir(parents=True, exist_ok=True)
            (sent / place).write_bytes(content)
        names = few(file.name for file in self.code)
        return f"its config and {names} ({size:,} bytes)" if self.code else "its config"

    def note(self) -> dict[str, Any]:
        return {"job": self.job, "address": self.address} if self.address else {}

    def status(self, note: Mapping[str, Any]) -> str:
        info = _info(note)
        if info is None:
            return f"Ray job {note['job']} is not known at {note['address']}: its cluster has ended, or was restarted"
        reason = f": {reason_of(info.message or '')}" if str(info.status) in ("PENDING", "FAILED") else ""
        return f"Ray job {note['job']} at {note['address']}: {str(info.status).lower()}{reason}"

    def is_over(self, note: Mapping[str, Any]) -> bool:
        info = _info(note)
        return info is None or info.status.is_terminal()

    def cancel(self, note: Mapping[str, Any]) -> str:
        """Have the job end: its driver passes the signal on to all machines."""
        if self.is_over(note):
            raise LaunchError(f"Ray job {note['job']} has ended already")
        _answer(connected(note["address"]).stop_job, note["job"])
        return f"signalled Ray job {note['job']} to save and stop"

    def output(self, note: Mapping[str, Any], logs: Path) -> Path:
        return logs / f"ray-{note['job']}.out"


def reason_of(text: str) -> str:
    """Return in one sentence why Ray cannot do something, from what it says."""
    if "No module named" in text:
        name = text.rpartition("No module named")[2].split()[0].strip("'\")")
        return f"a machine of the cluster has no package {name}: install Lockstep there as here, or set launch.python"
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "Ray does not say why")


def _driver(config: Config, threads: int, words: Sequence[str], **settings: str) -> tuple[str, ...]:
    """Return the words of the job's entrypoint."""
    launch = config.model_dump(mode="json", exclude_defaults=True, exclude={"address", "runtime_env"})
    text = json.dumps({"launch": {**launch, "kind": config.kind}, "cpus": config.cpus_of(threads), **settings})
    return (config.python, "-P", "-m", "lockstep.launch.ray_driver", text, *words)


def _runtime_env(config: Config) -> dict[str, Any]:
    variables = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(config.grace_seconds + MARGIN_SECONDS),
        # a launcher whose Ray process has ended gets SIGTERM, and saves: Ray would kill it
        "RAY_kill_child_processes_on_worker_exit": "0",
    }
    return {**config.runtime_env, "env_vars": {**config.runtime_env.get("env_vars", {}), **variables}}


def connected(address: str | None) -> Any:
    """Return a client of a cluster's Jobs API. Raises LaunchError, MissingExtra."""
    plugins.require("ray", "ray.job_submission", "aiohttp", what="launch.kind=ray")
    from ray.job_submission import JobSubmissionClient  # noqa: PLC0415 (a config is checked without it)

    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)
    with world.environment({ADDRESS: address} if address else {}):
        where = os.environ.get(ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
        try:
            return JobSubmissionClient()
        except (OSError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"no Ray cluster answers at {where} ({str(error).splitlines()[0]}): set launch.address to its head, "
                "such as http://HEAD:8265, or start one there with `ray start --head`"
            ) from None


def _answer(request: Any, *arguments: Any, **options: Any) -> Any:
    """Send a request. Raises LaunchError with Ray's complaint."""
    try:
        return request(*arguments, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(f"Ray refuses: {str(error).splitlines()[0]}") from None


def _info(note: Mapping[str, Any]) -> Any:
    """Return what the cluster knows of a job; None if it does not know it."""
    try:
        return _answer(connected(note["address"]).get_job_info, note["job"])
    except LaunchError as error:
        if "status code 404" in str(error):
            return None
        raise


def on_nodes(config: Config, threads: int, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a job on the machines of a run, in this folder. See contracts.HOOKS. Raises LaunchError."""
    address = connected(config.address).get_address()
    options = ("--address", address, "--runtime-env-json", json.dumps(_runtime_env(config)))
    driver = _driver(config, threads, words, folder=str(Path.cwd()))
    return (sys.executable, "-m", "ray.scripts.scripts", "job", "submit", *options, "--", *driver)


build = RayJobs
