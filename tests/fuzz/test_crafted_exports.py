"""Exports that somebody else has written: nothing in them is executed, and each that cannot be used gets a message."""

import json
import os
import pickle
import shutil
import stat
import struct
import zipfile

import pytest
import torch
from crafting import CANARY, archived, endless_graph, pickled
from exporting import image_case, user_case

from lockstep.base import trust
from lockstep.base.errors import ConfigError, DataError, ModelError
from lockstep.core.host.memory_meter import available_bytes
from lockstep.core.host.pretrained_files import check_folder
from lockstep.core.host.pretrained_processors import FeatureExtractor, ImageProcessor
from lockstep.data.text_tokenizers import open_tokenizer
from lockstep.inference import trained_model
from lockstep.inference.export import export_facts, export_reader
from lockstep.inference.export.formats import onnx as onnx_format
from lockstep.recipe.warm_start import warm_start

WEIGHTS = {
    "safetensors": "model.safetensors",
    "state_dict": "model.pt",
    "onnx": "model.onnx",
    "torch_export": "model.pt2",
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Kind -> folder."""
    root = tmp_path_factory.mktemp("exported")
    for kind in WEIGHTS:
        image_case().export(root / kind, kind)
    (root / "own").mkdir()
    user_case(root / "own").export(root / "user", "safetensors")
    return root


@pytest.fixture
def opened(commands, exported, tmp_path):
    """Change an export, then have it opened in a process -> what is said; it has to be a message."""

    def answer(kind, change):
        folder = shutil.copytree(exported / kind, tmp_path / "export")
        change(folder)
        found = commands.answer(["serve", "export", "--port", "0"], folder=tmp_path, seconds=30)
        assert found.kind == "message", found
        shutil.rmtree(folder)
        return found.output

    return answer


def told(**changes):
    """Give lockstep.json other fields."""

    def change(folder):
        body = json.loads((folder / "lockstep.json").read_text())
        (folder / "lockstep.json").write_text(json.dumps(body | changes))

    return change


def weights(kind, content):
    return lambda folder: (folder / WEIGHTS[kind]).write_bytes(content)


def test_a_pickle_in_the_place_of_weights(opened):
    for kind in WEIGHTS:
        assert "cannot be" in opened(kind, weights(kind, pickled())) or kind == "torch_export"
        opened(kind, lambda folder, kind=kind: archived(folder / WEIGHTS[kind]))


def test_an_archive_that_unpacks_to_more_than_it_is(opened):
    def compressed(folder):
        torch.save({"a": torch.zeros(1 << 20)}, folder / "big.pt")
        with (
            zipfile.ZipFile(folder / "big.pt") as big,
            zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as small,
        ):
            for name in big.namelist():
                small.writestr(name, big.read(name))

    assert "compressed" in opened("state_dict", compressed)


def test_a_program_of_somebody_else_is_not_executed(opened, exported, commands, tmp_path):
    def executing(folder):
        """The archive with a constant that torch unpickles."""
        with zipfile.ZipFile(folder / "model.pt2") as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        config = next(name for name in parts if name.endswith("_constants_config.json"))
        constant = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
        parts[config] = json.dumps({"config": {"x": constant}}).encode()
        parts[config.rpartition("/")[0] + "/tensor_0"] = pickled()
        with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content)

    assert "model.pt2 (" in opened("torch_export", executing)
    assert "--trust-code" in opened("torch_export", executing)
    folder = shutil.copytree(exported / "torch_export", tmp_path / "export")
    executing(folder)
    found = commands.answer(["serve", "export", "--port", "0", "--trust-code"], folder=tmp_path, seconds=30)
    assert found.kind == "executed"  # else this shows nothing
    os.unlink(tmp_path / CANARY)


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "sub/../../evil.py", "..\\evil.py", "C:evil.py", "", ".."])
def test_names_of_files_stay_in_the_folder(opened, tmp_path, name):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w')\n")

    def own(folder):
        body = json.loads((folder / "lockstep.json").read_text())
        told(model=body["model"] | {"file": name})(folder)

    assert "file" in opened("user", own)
    if name:
        assert "outside" in opened("state_dict", told(file=name))
        assert "outside" in opened("safetensors", told(files=[name]))


def test_a_link_to_code_elsewhere_is_not_followed(opened, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w')\n")

    def linked(folder):
        (folder / "my_model.py").unlink()
        (folder / "my_model.py").symlink_to(tmp_path / "evil.py")

    assert "my_model.py is a link, which is not followed" in opened("user", linked)


def test_a_header_that_claims_terabytes(opened):
    huge = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    opened("safetensors", weights("safetensors", struct.pack("<Q", len(huge)) + huge))
    opened("safetensors", weights("safetensors", struct.pack("<Q", 1 << 62) + huge))
    opened("safetensors", weights("safetensors", b""))


def test_settings_of_a_model_larger_than_its_weights(opened):
    assert "numbers" in opened("safetensors", told(labels=[str(i) for i in range(100000)]))
    opened("safetensors", told(image_shape=[60000, 8, 8]))
    opened("safetensors", told(image_shape=[1, 65536, 65536]))


@pytest.mark.parametrize("kind", ["safetensors", "state_dict", "onnx"])
def test_labels_and_shapes_that_do_not_fit(opened, kind):
    opened(kind, told(labels=["cat", "dog"]))
    opened(kind, told(labels=["cat", "dog", "owl", "cow"]))
    opened(kind, told(image_shape=[3, 8, 8]))
    opened(kind, told(image_shape=[1, -8, 8]))
    opened(kind, told(image_shape=[1, 0, 8]))


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), 1e-300, 1e300, "1", True])
def test_a_temperature_that_is_none(opened, temperature):
    fitted = {"temperature": temperature, "samples": 3, "ece_before": 0.1, "ece_after": 0.1}
    assert "temperature" in opened("safetensors", told(calibration=fitted))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"a":' * 100000,
        b"[" * 1000000,
        b"\xff\xfe",
        b"9" * 100000,
        pickle.dumps({"a": 1}),
    ],
    ids=["empty", "list", "section", "null", "deep", "deeper", "bytes", "digits", "pickle"],
)
def test_a_lockstep_json_that_is_none(opened, content):
    assert "lockstep.json" in opened("safetensors", lambda folder: (folder / "lockstep.json").write_bytes(content))


@pytest.mark.parametrize("name", ["lockstep.json", "model.safetensors", "my_model.py"])
def test_what_is_no_regular_file(opened, name):
    def replaced(by):
        def change(folder):
            (folder / name).unlink()
            by(folder / name)

        return change

    for by in (os.mkfifo, os.mkdir, lambda file: file.symlink_to("/dev/zero"), lambda file: file.symlink_to(file)):
        opened("user", replaced(by))


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_no_file_of_a_folder_is_read_for_ever(exported, tmp_path, make):
    """Whichever a library would open."""
    folder = shutil.copytree(exported / "safetensors", tmp_path / "export")
    learned = {"kind": "text", "tokenizer": "bpe"}
    told(vocabulary=300, recipe={"data": learned})(folder)
    for name in ("tokenizer.json", "adapter_model.safetensors", "config.json", "additional_chat_templates/a.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        make(folder / name)
        with pytest.raises(ModelError, match="it is a (pipe|device)"):
            export_reader.tokenizer_of(folder, export_facts.read(folder))
        with pytest.raises(DataError, match="it is a (pipe|device)"):
            check_folder(folder)  # of a model
        for opened in (
            ImageProcessor,
            FeatureExtractor,
            lambda name: open_tokenizer(name, None, vocabulary=9, cache=None),
        ):
            with pytest.raises(DataError, match="it is a (pipe|device)"):
                opened(str(folder))
        with pytest.raises(ConfigError, match="it is a (pipe|device)"):
            warm_start(torch.nn.Linear(1, 1), folder)
        (folder / name).unlink()
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", 1 << 40)
    with pytest.raises(ModelError, match="more than"):
        export_reader.tokenizer_of(folder, export_facts.read(folder))


@pytest.mark.parametrize("asked", [{"r": 10**9}, {"r": 8, "rank_pattern": {"q_proj": 10**9}}])
def test_an_adapter_of_any_rank_is_refused(tmp_path, asked):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **asked}))
    with pytest.raises(ModelError, match="asks for an adapter of rank 1,000,000,000"):
        check_folder(tmp_path)


def test_what_lies_in_folders_beside_a_model_is_not_looked_at(tmp_path):
    (tmp_path / "corpora").mkdir()
    os.mkfifo(tmp_path / "corpora/pipe")
    (tmp_path / "corpora/all.txt").touch()
    os.truncate(tmp_path / "corpora/all.txt", 1 << 40)
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    check_folder(tmp_path)
    (tmp_path / "corpora").rename(tmp_path / "additional_chat_templates")
    with pytest.raises(DataError, match="it is a pipe"):
        check_folder(tmp_path)


@pytest.mark.parametrize("grows", [False, True])
def test_a_graph_that_has_no_end(exported, tmp_path, monkeypatch, grows):
    """Its time is limited, and its memory: with a limit that is soon reached."""
    folder = shutil.copytree(exported / "onnx", tmp_path / "export")
    monkeypatch.setattr(f"{onnx_format.__name__}.MOST_SECONDS", 30 if grows else 1)
    monkeypatch.setattr(f"{onnx_format.__name__}.LEAST_BYTES", available_bytes() - (1 << 30) if grows else 0)
    endless_graph(folder / "model.onnx", grows=grows)
    with pytest.raises(ModelError, match="takes more than .* s, or all memory"):
        trained_model.loader(folder)()


def test_more_than_a_file_of_facts_may_hold(tmp_path):
    with (tmp_path / "lockstep.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="more than"):
        export_facts.read(tmp_path)


def test_what_was_written_here_is_known(exported):
    file = exported / "torch_export" / "model.pt2"
    assert trust.is_known(trust.Code.of(file, file.read_bytes()))
