"""What a Ray job gets, before a cluster is asked: config, code and command."""

import json
import subprocess
import sys

import pytest

from lockstep.base.config import dump, parse
from lockstep.base.contracts import Request
from lockstep.base.errors import ConfigError, LaunchError
from lockstep.launch.launchers.ray import RayJobs
from lockstep.recipe.recipe import Recipe


def launcher(folder, settings):
    """A launcher, and its plan for a run whose augmentation imports a second file."""
    (folder / "own.py").write_text("import helper\n\n\ndef augment(sample):\n    return helper.same(sample)\n")
    (folder / "helper.py").write_text("def same(sample):\n    return sample\n")
    text = f"launch: {{kind: ray, {settings}}}\ndata: {{kind: digits, augment: {folder}/own.py}}\n"
    recipe = parse(Recipe, text, file="c.yaml")
    request = Request(recipe=folder / "runs" / "a b" / "launch.yaml", text=dump(recipe), arguments=("--trust-code",))
    made = RayJobs(recipe.launch, threads=2, shards=64)
    return made, made.plan(request)


def test_the_machines_get_their_command_and_the_code_at_its_place_in_the_run(tmp_path):
    made, plan = launcher(tmp_path, "nodes: 2, gpus: 4, recovery: live, grace_seconds: 9, runtime_env: {pip: [x]}")
    run = tmp_path / "runs" / "a b"
    [(file, text)] = plan.files.items()
    assert file == run / "ray" / "launch.yaml"
    sent = parse(Recipe, text, file="c.yaml")
    assert sent.data.augment == run / "ray" / "code" / "0" / "own.py"
    assert sent.launch.processes == 4
    options = dict(zip(plan.argv, plan.argv[1:], strict=False))
    environment = json.loads(options["--runtime-env-json"])
    assert environment["pip"] == ["x"] and environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "39"
    driver = plan.argv[plan.argv.index("--") + 1 :]
    assert driver[:4] == ("python", "-P", "-m", "lockstep.launch.ray_driver")
    assert driver[5:] == ("train", "launch.yaml", "--trust-code")
    settings = json.loads(driver[4])
    assert settings["cpus"] == 8 and settings["launch"]["recovery"] == "live"
    assert settings["output"] == str(run / "logs" / f"ray-{options['--submission-id']}.out")
    assert not run.exists()
    assert made.note() == {}  # until it is submitted


def test_what_is_sent_is_limited_and_said(tmp_path):
    made, _ = launcher(tmp_path, "nodes: 2")
    assert made._collect(tmp_path / "sent") == "its config and own.py, helper.py (104 bytes)"
    assert (tmp_path / "sent" / "code" / "0" / "helper.py").read_bytes() == (tmp_path / "helper.py").read_bytes()
    with (tmp_path / "helper.py").open("a") as file:
        file.write("#" * (33 << 20))
    with pytest.raises(LaunchError, match="the code of the recipe is 33 MiB, of which at most 32 are sent"):
        made._collect(tmp_path / "sent")


def test_without_a_cluster_one_sentence_says_so(tmp_path):
    (tmp_path / "c.yaml").write_text("launch: {kind: ray, address: 'http://127.0.0.1:9'}\n")
    command = [sys.executable, "-m", "lockstep", "train", "c.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("no Ray cluster answers at http://127.0.0.1:9"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_folder_that_is_sent_is_not_to_be_chosen():
    with pytest.raises(ConfigError, match="leave out working_dir"):
        parse(Recipe, "launch: {kind: ray, runtime_env: {working_dir: .}}", file="c.yaml")
