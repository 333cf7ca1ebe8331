"""Data, exports and copies of checkpoints in an object store, against a real server of its API, with real kills."""

import json
import shutil
import signal
import subprocess

import numpy as np
import pytest
import warm
from object_server import BUCKET, object_store
from running import family, lockstep, started, summary, wait_for_steps
from typer.testing import CliRunner

import lockstep as api
from lockstep.base.errors import ConfigError, MissingExtra, ModelError, RemoteStorageError, masked
from lockstep.base.events import Warned
from lockstep.base.remote_path import RemotePath, is_url, parsed
from lockstep.checkpoint.layout import MANIFEST
from lockstep.cli._app import app
from lockstep.core.host import remote_storage
from lockstep.inference.export import uploads
from lockstep.recipe import recipe as recipes

PIXELS = np.zeros((8, 8), np.uint8)
CONFIG = {
    "data": {"kind": "digits", "limit": 200},
    "train": {"steps": 8, "global_batch": 32, "micro_batch": 8},
    "launch": {"processes": 1},
}


@pytest.fixture
def store(monkeypatch):
    with object_store(monkeypatch) as running:
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    done = lockstep(folder, "train", "c.yaml", "run.name=a")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "a"


def at(name):
    return RemotePath(f"s3://{BUCKET}/{name}")


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("text", "is_remote"),
    [
        ("s3://bucket/a.csv", True),
        ("s3:/bucket/a.csv", True),
        ("gs://bucket/a", True),
        ("hf://datasets/owner/name/a.csv", True),
        ("data/a.csv", False),
        ("/data/a:b.csv", False),
        ("C:/data/a.csv", False),
        ("~/a.csv", False),
    ],
)
def test_urls_are_told_from_paths(text, is_remote):
    assert is_url(text) is is_remote
    assert isinstance(parsed(text), RemotePath) is is_remote


def test_a_remote_path_keeps_its_url():
    path = parsed("s3:/bucket/folder") / "train.csv"
    assert (str(path), path.name, path.suffix, path.exists()) == (
        "s3://bucket/folder/train.csv",
        "train.csv",
        ".csv",
        False,
    )


def test_settings_take_urls_where_they_can(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: files, train: 's3://bucket/train.csv'}\n")
    recipe = recipes.load(tmp_path / "c.yaml", ["model.kind=transformer", "model.name=x"])
    assert str(recipe.data.train) == "s3://bucket/train.csv"
    assert recipe.data.modality == "text"
    again = recipes.of_sections(recipe.model_dump(mode="json"), [])
    assert again.data.train == recipe.data.train
    for wrong, needle in [
        ("run.dir=s3://bucket/runs", "is a URL, but a path on this machine is needed"),
        ("checkpoint.mirror=/tmp/copies", "should be a URL such as s3://bucket/folder"),
    ]:
        with pytest.raises(ConfigError, match=needle):
            recipes.load(tmp_path / "c.yaml", [wrong])


def test_a_copy_is_made_once_and_again_after_a_change(store, tmp_path):
    store.put("data/one.txt", b"1" * 1000)
    store.put("data/below/two.txt", b"2")
    heard = []
    copy = remote_storage.local_copy(at("data"), tmp_path, lambda *done: heard.append(done))
    assert files_of(copy) == {"one.txt": b"1" * 1000, "below/two.txt": b"2"}
    assert heard[0] == (0, 1001)
    assert heard[-1] == (1001, 1001)
    asked = len(store.downloads())
    assert remote_storage.local_copy(at("data"), tmp_path) == copy
    assert len(store.downloads()) == asked
    store.put("data/below/two.txt", b"3")
    assert files_of(remote_storage.local_copy(at("data"), tmp_path))["below/two.txt"] == b"3"
    assert remote_storage.local_copy(at("data/one.txt"), tmp_path).read_bytes() == b"1" * 1000


def test_a_killed_copy_goes_on_with_the_files_that_are_missing(store, tmp_path):
    for number in range(200):
        store.put(f"many/{number:03}.bin", bytes([number]) * 5)
    (tmp_path / "copying.py").write_text(f"""
import os, sys
from pathlib import Path
from lockstep.base.remote_path import RemotePath
from lockstep.core.host import remote_storage
def progress(done, total):
    if done >= 500:
        os.kill(os.getpid(), 9)
remote_storage.local_copy(RemotePath("{at("many")}"), Path(sys.argv[1]), progress)
""")
    done = warm.run([tmp_path / "copying.py", tmp_path], cwd=tmp_path, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert len(store.downloads()) == 128
    copy = remote_storage.local_copy(at("many"), tmp_path)
    assert files_of(copy) == {f"{number:03}.bin": bytes([number]) * 5 for number in range(200)}
    assert len(store.downloads()) == 200


def test_what_cannot_be_read_is_said_in_a_line(store, tmp_path):
    with pytest.raises(RemoteStorageError, match="there is nothing at s3://bucket/nowhere"):
        remote_storage.local_copy(at("nowhere"), tmp_path)
    with pytest.raises(RemoteStorageError, match="there is nothing at s3://none/x"):
        remote_storage.local_copy(RemotePath("s3://none/x"), tmp_path)
    with pytest.raises(RemoteStorageError, match="there is no store of this kind"):
        remote_storage.local_copy(RemotePath("s4://bucket/x"), tmp_path)
    with pytest.raises(MissingExtra, match="needs a package that is not installed"):
        remote_storage.local_copy(RemotePath("gs://bucket/x"), tmp_path)
    store.refuses = True
    with pytest.raises(RemoteStorageError, match="check the credentials"):
        remote_storage.local_copy(at("data"), tmp_path)


def test_a_key_beside_keys_below_it_is_said_in_a_line(store, tmp_path):
    """No disk holds a file and a folder of one name; but what consoles leave for an empty folder is no file."""
    for names in (("a", "a/b"), ("c/d", "c/d/e/f"), ("g/h", "g//h")):
        place = f"both-{names[0][0]}"
        for name in names:
            store.put(f"{place}/{name}", b"1")
        for copied in (remote_storage.local_copy, remote_storage.download):
            with pytest.raises(
                RemoteStorageError, match=f"holds {names[0]} more than once, or as a file beside a folder"
            ):
                copied(at(place), tmp_path / place)
    done = lockstep(tmp_path, "serve", str(at(place)))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False) and "rename or remove one" in done.stderr
    for name in ("made/", "made/x/", "made/x/y"):
        store.put(name, b"1" * name.endswith("y"))
    assert files_of(remote_storage.local_copy(at("made"), tmp_path)) == {"x/y": b"1"}


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://ada:{SECRET}@bucket/x",
        f"s3://ada:{SECRET}/+{SECRET}@bucket/x",
        f"https://ada:{SECRET}@127.0.0.1:9/x",
        f"https://ada:123{SECRET}@127.0.0.1:9/x",
        f"ftp://:{SECRET}@127.0.0.1:9/x",
        f"https://127.0.0.1:9/x?token={SECRET}",
        f"https://127.0.0.1:9/x?a=b&X-Amz-Signature={SECRET}&Api_Key={SECRET}",
    ],
)
def test_secrets_of_a_url_are_taken_nowhere_and_said_nowhere(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(json.dumps(CONFIG))
    (tmp_path / "mirrored.yaml").write_text(json.dumps(CONFIG | {"checkpoint": {"mirror": url}}))
    for arguments in (
        ("serve", url),
        ("train", url),
        ("train", "mirrored.yaml"),
        ("train", "c.yaml", f"checkpoint.mirror={url}"),
        ("train", "c.yaml", f"model.init={url}"),
        ("train", "c.yaml", f"run.dir={url}"),
        ("train", "c.yaml", f"run.nmae={url}"),
        ("train", "c.yaml", f"train.steps={url}"),
        ("export", "nowhere", "--to", url),
        ("predict", url, "x.csv", "--out", url),
    ):
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 2 and SECRET not in done.output, (arguments, done.output)
    assert [path.name for path in tmp_path.rglob("*")] == ["c.yaml", "mirrored.yaml"]


def test_urls_without_a_secret_are_left_as_they_are():
    for url in (
        "hdfs://node:8020/data@2020/x.csv",
        "abfs://box@account.dfs.core.windows.net/x",
        "hf://datasets/owner/name@main/a:b.csv",
        "https://[::1]:9000/a?version=3",
        "s3://bucket/a?versionId=1",
    ):
        assert masked(url) == url == str(parsed(url))
    for text in ("a", "a.", "a://b:", "://?a", "?key", "&a:/"):
        assert masked("a://" + text * 10**5)  # soon
    assert Warned(message="http://ada:pw@here/x?key=1 fails").message == "http://***@here/x?key=*** fails"


def test_an_unreachable_store_is_said_soon(monkeypatch, tmp_path):
    with object_store(monkeypatch):
        pass
    with pytest.raises(RemoteStorageError, match="cannot be used"):
        remote_storage.local_copy(at("data"), tmp_path)


def test_training_on_remote_data_gives_the_bits_of_local_data(store, tmp_path):
    """A table of texts, whose modality follows from its suffix, and a folder of images."""
    (tmp_path / "train.txt").write_text("the cat sat on the mat\n" * 300)
    store.put("texts/train.txt", (tmp_path / "train.txt").read_bytes())
    sections = {
        "data": {"kind": "text", "context": 16, "cache": "cache"},
        "model": {"kind": "gpt", "layers": 1, "width": 16, "heads": 2},
        "train": {"steps": 4, "global_batch": 16, "micro_batch": 8},
        "evaluate": {"sample_tokens": 0},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(sections))
    for name, place, processes in (("near", "train.txt", 1), ("far", f"{at('texts/train.txt')}", 2)):
        done = lockstep(
            tmp_path, "train", "c.yaml", f"data.train={place}", f"run.name={name}", f"launch.processes={processes}"
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert summary(tmp_path, "near")["digest"] == summary(tmp_path, "far")["digest"]
    assert len(store.downloads()) == 1


def test_an_export_is_uploaded_and_used_by_its_url(store, run, tmp_path):
    local = api.export(run, to=tmp_path / "export")
    done = lockstep(tmp_path, "export", run, "--to", at("models/digits"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"copied to {at('models/digits')}\n")
    names = {name.removeprefix("models/digits/") for name in store.names("models/digits/")}
    assert names == set(files_of(local.folder))
    far, near = api.load(str(at("models/digits"))), api.load(local)
    assert far.predict([PIXELS]) == near.predict([PIXELS])
    measured = lockstep(tmp_path, "evaluate", at("models/digits"), "--to", "results")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert json.loads((tmp_path / "results" / "evaluation.json").read_text())["samples"] > 100


def test_predicting_with_a_remote_model_and_a_remote_table(store, run, tmp_path):
    api.export(run, to=str(at("model")))
    store.put_folder("images", _images(tmp_path / "images"))
    done = lockstep(tmp_path, "predict", at("model"), at("images"), "--out", "out.csv", "--processes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4
    refused = lockstep(tmp_path, "predict", at("model"), at("images"), "--out", at("out.csv"))
    assert refused.returncode == 2
    assert "write to a file on this machine" in refused.stderr


def _images(folder):
    from PIL import Image

    folder.mkdir()
    for number in range(3):
        Image.new("L", (8, 8), number * 40).save(folder / f"{number}.png")
    return folder


def test_a_killed_upload_leaves_no_export_and_is_repeated(store, run, tmp_path):
    store.holds = ".safetensors"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = warm.Popen(["lockstep", "export", run, "--to", at("killed")], **pipes)
    assert store.held.wait(90), process.communicate(timeout=10)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    store.holds = None
    assert "killed/lockstep.json" not in store.names()
    with pytest.raises(ConfigError, match="neither an export nor a run"):
        api.load(str(at("killed")))
    api.export(run, to=str(at("killed")))
    assert "killed/lockstep-upload.json" not in store.names()
    assert api.load(str(at("killed"))).predict([PIXELS])


def test_an_export_replaces_an_export_and_nothing_else(store, run, tmp_path):
    store.put("mine/notes.txt", b"keep me")
    with pytest.raises(ModelError, match=r"holds other files, such as 'notes.txt'"):
        uploads.to_store(at("mine"), is_space=False)
    api.export(run, "export.kind=state_dict", to=str(at("models/one")))
    store.put("models/one/notes.txt", b"keep me")
    api.export(run, to=str(at("models/one")))
    names = store.names("models/one/")
    assert "models/one/notes.txt" in names
    assert not [name for name in names if name.endswith(".pt")]
    with pytest.raises(ConfigError, match="give one of them"):
        api.export(run, to=str(at("models/one")), push="ada/digits")


def mirrored(folder, *more):
    """Arguments of a run of 12 steps with copies of its checkpoints."""
    (folder / "c.yaml").write_text(json.dumps({**CONFIG, "train": {**CONFIG["train"], "steps": 12}}))
    return ["train", "c.yaml", "run.name=a", f"checkpoint.mirror={at('runs')}", "checkpoint.every_steps=4", *more]


def steps_at_mirror(store):
    """Of the complete checkpoints."""
    names = store.names("runs/a/")
    return [int(name.split("/")[2].removeprefix("step-")) for name in names if name.endswith(f"/{MANIFEST}")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = lockstep(folder, *mirrored(folder, "checkpoint.mirror=null"))
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, "a")["digest"]


@pytest.mark.parametrize("is_disk_gone", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_a_run_is_killed_while_it_copies_a_checkpoint(store, tmp_path, undisturbed, is_disk_gone):
    """What is at the place without its manifest is no checkpoint; the next start copies it, or a later one. Without its
    disk the run goes on from the copy before."""
    store.holds = f"step-000000008/{MANIFEST}"
    command = started(tmp_path, *mirrored(tmp_path))
    assert store.held.wait(90), command.communicate(timeout=10)
    for process in family(command):
        process.kill()
    output, _ = command.communicate(timeout=20)
    store.holds = None
    assert any(name.startswith("runs/a/step-000000008/") for name in store.names()), output
    assert 8 not in (there := steps_at_mirror(store))  # 4 may be, and 12: the newest is copied first
    if is_disk_gone:
        shutil.rmtree(tmp_path / "runs")
    done = lockstep(tmp_path, *mirrored(tmp_path, "launch.processes=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    first = max(there, default=0) if is_disk_gone else 0  # checkpoints of before went with the disk
    assert (f"the checkpoint of step {first} was copied from s3://bucket/runs/a" in done.stdout) is (first > 0)
    assert steps_at_mirror(store) == [step for step in (4, 8, 12) if step >= first]
    assert summary(tmp_path, "a")["digest"] == undisturbed


def test_copies_are_the_checkpoints_on_disk(store, tmp_path):
    """Byte for byte; those that the run deletes are deleted there, too."""
    done = lockstep(tmp_path, *mirrored(tmp_path, "checkpoint.keep=2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_at_mirror(store) == [8, 12]
    on_disk = tmp_path / "runs" / "a" / "checkpoints"
    assert {name.removeprefix("runs/a/") for name in store.names("runs/a/")} == set(files_of(on_disk))
    for name, contents in files_of(on_disk).items():
        assert store.get(f"runs/a/{name}") == contents


def test_a_damaged_copy_is_passed_over(store, tmp_path):
    done = lockstep(tmp_path, *mirrored(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    damaged = next(name for name in store.names("runs/a/step-000000012/") if name.endswith(".distcp"))
    store.put(damaged, b"x" * len(store.get(damaged)))
    other = tmp_path / "other"
    other.mkdir()
    done = lockstep(other, *mirrored(other))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed over s3://bucket/runs/a/step-000000012" in done.stdout
    assert "the checkpoint of step 8 was copied" in done.stdout
    assert store.get(damaged) != b"x" * len(store.get(damaged))
    assert summary(other, "a")["digest"] == summary(tmp_path, "a")["digest"]


def test_a_mirror_that_refuses_is_a_warning_and_one_that_would_be_overwritten_an_error(store, tmp_path):
    done = lockstep(tmp_path, *mirrored(tmp_path))
    assert done.returncode == 0
    other = tmp_path / "other"
    other.mkdir()
    refused = lockstep(other, *mirrored(other), "--resume", "never")
    assert refused.returncode == 2
    assert "holds checkpoints that are not on disk, the newest of step 12" in refused.stderr
    store.refuses = True
    failed = lockstep(other, *mirrored(other))
    assert failed.returncode == 2
    assert "checkpoint.mirror: s3://bucket/runs/a" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_copies_that_fail_do_not_end_a_run(store, tmp_path):
    command = started(tmp_path, *mirrored(tmp_path, "train.steps=200", "checkpoint.every_steps=100"))
    wait_for_steps(tmp_path / "runs" / "a", 1)
    store.refuses = True
    output, _ = command.communicate(timeout=100)
    assert command.returncode == 0, output
    assert "the checkpoints could not be copied to s3://bucket/runs/a" in output
    assert summary(tmp_path, "a")["status"] == "finished"
