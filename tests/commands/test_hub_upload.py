"""Exports and Spaces on a hub: what is pushed is what is downloaded, after a kill as well; what is refused, and why."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from hub_server import hub_of
from huggingface_hub import constants
from running import lockstep

from lockstep.base.errors import HubError
from lockstep.inference.export import export_facts, uploads

TOKENS = {"hf_ada": ("ada", "write"), "hf_reader": ("ada", "read"), "hf_bob": ("bob", "write")}
CONFIG = {
    "data": {"kind": "digits", "limit": 200},
    "train": {"steps": 8, "global_batch": 32, "micro_batch": 8},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pushed")
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    done = lockstep(folder, "train", "c.yaml", "run.name=a", "launch.processes=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "a"


@pytest.fixture
def hub():
    with hub_of(TOKENS) as running:
        yield running


def variables(hub, folder, token="hf_ada"):
    """Of a process that pushes to the hub, by LFS."""
    home = {"HF_HOME": str(folder / "hf"), "HF_TOKEN": token}
    return {
        **os.environ,
        **home,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def pushing(hub, folder, *arguments):
    """`lockstep export`, in a new interpreter: the client reads HF_ENDPOINT when it is imported."""
    line = [sys.executable, "-m", "lockstep", "export", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, env=variables(hub, folder), **pipes)


def python(hub, folder, text):
    """Run a script -> what it prints, as JSON."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    pipes = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, script], env=variables(hub, folder), **pipes)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_push_is_repeated_and_whole(hub, run, tmp_path):
    """Nothing is in the repository before all of it is; what is downloaded answers as what was exported."""
    hub.holds = True
    process = pushing(hub, tmp_path, run, "--to", tmp_path / "export", "--push", "ada/digits")
    assert hub.held.wait(90), process.communicate(timeout=10)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    repository = hub.repositories["models/ada/digits"]
    assert (list(repository.files), hub.objects) == ([".gitattributes"], {})

    hub.holds = False
    process = pushing(hub, tmp_path, run, "--to", tmp_path / "export", "--push", "ada/digits")
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert output.endswith(f"pushed to {hub.url}/ada/digits\n")
    facts = export_facts.read(tmp_path / "export")
    assert repository.commits[-1].message == f"a, step 8, digest {facts.digest}"
    assert len(repository.commits) == 2 and hub.uploads == 1
    assert repository.files == {".gitattributes": repository.files[".gitattributes"], **contents(tmp_path / "export")}

    found = python(
        hub,
        tmp_path,
        f"""
        import json, shutil
        import numpy as np
        from huggingface_hub import hf_hub_download, snapshot_download
        import lockstep

        images = list(np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8))
        whole = snapshot_download("ada/digits", local_dir={str(tmp_path / "whole")!r})
        digest = json.load(open(hf_hub_download("ada/digits", "lockstep.json")))["digest"]
        answers = [lockstep.load(each).predict(images) for each in ({str(run)!r}, whole)]
        again = lockstep.export({str(run)!r}, to={str(tmp_path / "export")!r}, push="ada/digits")
        print(json.dumps([digest, answers[0] == answers[1], again.url]))
        """,
    )
    assert found == [facts.digest, True, f"{hub.url}/ada/digits"]
    assert (len(repository.commits), hub.uploads) == (2, 1)  # nothing had changed


def test_refusals_and_replacements(hub, run, tmp_path):
    """A user who may not write gets a message; another kind takes the files of the former with it, and leaves what is not its."""
    found = python(
        hub,
        tmp_path,
        f"""
        import json, os
        import lockstep
        from lockstep.base.errors import HubError

        def push(name, *settings, token="hf_ada", **more):
            os.environ["HF_TOKEN"] = token
            try:
                return lockstep.export({str(run)!r}, *settings, push=name, **more).url
            except HubError as error:
                return str(error)

        print(json.dumps([
            push("ada/digits", token="hf_wrong"),
            push("ada/digits", token="hf_reader"),
            push("ada/digits", token="hf_bob"),
            push("ada/digits"),
            push("ada/digits", "export.kind=safetensors", private=True),
            push("ada/digits", "export.kind=state_dict"),
            push("ada/secret", space=True, private=True),
        ]))
        """,
    )
    wrong, reader, other, url, public, replaced, space = found
    assert wrong.startswith("ada/digits: the hub does not accept the token: log in again with `hf auth login`")
    assert f"The export is in {run / 'export'}; the same command pushes it again" in wrong
    for said in (reader, other):
        assert said.startswith("ada/digits: the hub does not allow this: the token needs permission to write")
    assert url == replaced == f"{hub.url}/ada/digits"
    assert public.startswith(f"{url} is there already, and public")
    repository = hub.repositories["models/ada/digits"]
    assert set(repository.files) == {".gitattributes", "README.md", "lockstep.json", "model.pt"}
    assert set(repository.commits[-2].files) == {*contents(run / "export"), ".gitattributes"}
    assert space == f"{hub.url}/spaces/ada/secret"
    made = hub.repositories["spaces/ada/secret"]
    assert (made.is_private, made.settings["sdk"]) == (True, "docker")
    assert made.files == contents(run / "space")


@pytest.mark.parametrize(
    "name", ["digits", "ada/", "ada/my digits", "ada/a/b", "../ada/x", "ada/a--b", "https://x/a/b"]
)
def test_a_malformed_name(run, name):
    """Before anything is exported."""
    done = lockstep(run.parent, "export", "a", "--to", "nowhere", "--push", name)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"{name!r} is no name on the hub: give --push OWNER/NAME")
    assert not (run.parent / "nowhere").exists()


def test_what_keeps_a_push_from_the_hub(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))

    def refusal():
        with pytest.raises(HubError) as raised:
            uploads.to_hub("ada/digits", is_space=False, is_private=False)
        return str(raised.value)

    assert refusal() == "a push needs a token that may write: log in with `hf auth login`, or set HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "hf_ada")
    with hub_of(TOKENS) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        uploads.to_hub("ada/digits", is_space=False, is_private=False)
    assert refusal() == f"{hub.url} does not answer: check the network, and HF_ENDPOINT if it is set"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal() == "nothing can be pushed in offline mode: unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
