"""A run folder from somebody else: links, FIFOs and words in it lead nowhere else, and cost neither time nor memory."""

import os
import re

import pytest
from test_training import config_in, run_on_rank

from lockstep.base.errors import ConfigError, LaunchError, ModelError
from lockstep.data import bad_samples
from lockstep.inference import trained_model
from lockstep.inference.export import space
from lockstep.launch import run_control, run_folder

RECIPE = "data: {kind: digits}\nrun: {dir: %s, name: planted}\n"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "runs/own"
    (made / "checkpoints").mkdir(parents=True)
    (made / "recipe.yaml").write_text(RECIPE % (tmp_path / "outside"))
    return made


def test_a_run_is_where_it_lies_whatever_its_recipe_says(folder):
    (folder / "checkpoints").rename(folder / "others")
    (folder / "others/step-000000001").mkdir()
    (folder / "others/step-000000001/manifest.json").write_text("{}")
    for path in (folder, folder / "others/step-000000001"):
        assert run_folder.locate(path)[0].folder == folder


def test_a_run_does_not_write_into_another(folder, tmp_path):
    other = tmp_path / "runs/other"
    other.mkdir()
    (other / "checkpoints").symlink_to(folder / "checkpoints")
    with pytest.raises(ConfigError, match=r"other/checkpoints is a link, but a run writes to it: remove it"):
        run_folder.check_folder(other)
    (other / "checkpoints").unlink()
    (tmp_path / "disk").mkdir()
    (other / "checkpoints").symlink_to(tmp_path / "disk")  # on another disk, say
    run_folder.check_folder(other)
    (other / "logs").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match="other/logs is a link"):
        run_folder.check_folder(other)


@pytest.mark.parametrize("name", ["space", "space/model"])
def test_an_export_does_not_follow_a_link_that_lies_there(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(trained_model, "run_of", lambda *_: (run_folder.locate(folder)[0], folder))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(tmp_path)
    with pytest.raises(ModelError, match=rf"{name} is a link, which is not followed: .* with --to"):
        trained_model.export_space(folder, None, None)


def fifo(file):
    os.mkfifo(file)


def huge(file):
    file.touch()
    os.truncate(file, 6 << 30)


def link(file):
    file.with_name("precious").write_text("a secret")
    file.symlink_to("precious")


def other_bytes(file):
    file.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("name", ["Dockerfile", "README.md", ".gitattributes"])
@pytest.mark.parametrize("made", [fifo, huge, link, other_bytes])
def test_what_lies_in_the_folder_of_a_space_is_read_with_care(tmp_path, name, made):
    made(tmp_path / name)
    with pytest.raises(ModelError, match=r"holds a file that cannot be read \(.*\): name another folder with --to"):
        space.check(tmp_path)


def test_lists_of_bad_samples_are_read_with_care(tmp_path):
    good = '{"split": "train", "sample": 3, "reason": "torn"}\n'
    bad = ['{"sample":1}', "[1]", '{"split": "train", "sample": {}}', '{"split": "x", "sample": 1}', "[" * 99999, "}"]
    bad_samples.file_of(tmp_path, 0).write_text("".join(f"{line}\n{good}" for line in bad) + '{"split": "train", "sam')
    os.mkfifo(bad_samples.file_of(tmp_path, 7))
    assert bad_samples.listed(tmp_path) == {"train": {"count": 1, "indices": [3]}}


def test_logs_do_not_follow_a_link(folder, tmp_path):
    (tmp_path / "secret").write_text("precious")
    (folder / "launch.yaml").write_text("data: {kind: digits}\n")
    (folder / "job.json").write_text('{"kind": "local", "host": "x", "process": 4000000, "began": 1.0}')
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").symlink_to(tmp_path / "secret")
    with pytest.raises(LaunchError, match=r"rank-0.log is a link, which is not followed"):
        list(run_control.log_lines(folder, 0, follow=False))


@pytest.mark.parametrize("name", ["logs", "summary.json", "metrics.jsonl", ".lock"])
def test_what_lies_in_the_way_is_told_before_training(ranks, tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).symlink_to(tmp_path / "nowhere")
    for message in ranks(2, run_on_rank, config_in(tmp_path, "a")):
        assert re.search(rf"ConfigError: .*/a/{name} is a link, .*: remove it, or choose another run.name", message)
