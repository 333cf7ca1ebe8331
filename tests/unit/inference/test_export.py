"""How a model leaves: an export appears, or changes, only when it is whole and right, and nothing else is touched."""

import os
import subprocess
import sys
from dataclasses import replace

import exporting
import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
from exporting import listing, names
from filelock import FileLock
from members import further
from places import SUPPORT
from safetensors.torch import load_file

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, ModelError
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_reader import forward_of, is_export
from lockstep.recipe.export_config import ExportSection, check

WEIGHTS = ["pretrained", "safetensors", "state_dict"]
"""Kinds that take no second to write."""


def of(folder, case, seed=100):
    """Whether an export predicts as a model does."""
    batch = case.batch(4, seed=seed)
    with torch.no_grad():
        return torch.allclose(forward_of(folder)(batch), case.logits(batch), atol=1e-5)


@pytest.fixture
def case():
    return exporting.image_case()


@pytest.fixture
def second():
    """Another of the same shape."""
    return exporting.image_case(seed=2)


LOAD = """
import runpy, sys, numpy, torch
loader = runpy.run_path(sys.argv[1] + "/loader.py", run_name="__main__")
with torch.no_grad():
    logits = loader["load"](trust_code="--trust-code" in sys.argv)({"image": torch.from_numpy(numpy.load(sys.argv[2]))})
numpy.save(sys.argv[3], logits.numpy())
"""


def run(*argv, cwd, code=0):
    """What a process of another user says."""
    environment = {**os.environ, "XDG_STATE_HOME": str(cwd / "state")}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], cwd=cwd, timeout=100, capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def test_a_stranger_loads_the_export(tmp_path):
    """In a process of its own, elsewhere, with nothing but the folder and Lockstep: the user's own file is in it, which
    is executed once that is asked for."""
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    case = exporting.user_case(tmp_path / "code")
    case.export(tmp_path / "an export")
    (tmp_path / "code" / "my_model.py").unlink()
    batch = case.batch(6, seed=3)
    np.save(tmp_path / "elsewhere" / "images.npy", batch["image"].numpy())
    words = ["-c", LOAD, tmp_path / "an export", "images.npy", "logits.npy"]
    refused = run(*words, cwd=tmp_path / "elsewhere", code=1)
    assert "my_model.py (" in refused and "add --trust-code (in Python: load(trust_code=True))" in refused
    printed = run(*words, "--trust-code", cwd=tmp_path / "elsewhere")
    assert printed.startswith("UserModel(") and "in_features=64, out_features=16" in printed
    logits = case.logits(batch).numpy()
    assert np.allclose(np.load(tmp_path / "elsewhere" / "logits.npy"), logits, atol=1e-5)
    assert len({tuple(row) for row in logits.tolist()}) == 6


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("pretrained", ["README.md", "loader.py", "lockstep.json", "model.safetensors"]),
        ("safetensors", ["README.md", "lockstep.json", "model.safetensors"]),
        ("state_dict", ["README.md", "lockstep.json", "net.pt"]),
    ],
)
def test_a_folder_with_these_files(case, tmp_path, kind, files):
    target = tmp_path / "new" / "folders" / "export"
    settings = {"file": "net.pt"} if kind == "state_dict" else {}
    case.export(target, kind, **settings)
    assert names(target) == files
    assert names(target.parent) == ["export"]
    assert export_facts.read(target).file == files[-1]
    assert of(target, case)
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1, "some could not be read by others"


def test_names_in_the_files_are_those_of_the_unwrapped_network(tmp_path):
    case = exporting.user_case(tmp_path)
    case.export(tmp_path / "a", "safetensors")
    case.export(tmp_path / "b", "state_dict")
    expected = case.model.network.state_dict()
    for state in (load_file(tmp_path / "a/model.safetensors"), torch.load(tmp_path / "b/model.pt", weights_only=True)):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


TIED = """
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.back.weight = self.there.weight

    def forward(self, batch):
        return self.head(self.back(self.there(batch["image"].flatten(1).to(self.head.weight.dtype) / 255)))


def build(options, spec):
    return Tied()
"""


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_weights(tmp_path, kind, dtype):
    case = exporting.user_case(tmp_path, TIED)
    case.export(tmp_path / "e", kind, dtype=dtype)
    network = forward_of(tmp_path / "e").network
    assert network.back.weight is network.there.weight


def test_a_users_file_that_is_called_like_one_of_ours(tmp_path):
    case = exporting.user_case(tmp_path, name="loader.py")
    case.export(tmp_path / "e")
    assert (tmp_path / "e" / "loader.py").read_text() == exporting.MY_MODEL
    assert of(tmp_path / "e", case)


REGRESSION = """
from torch import nn


class Price(nn.Linear):
    def forward(self, batch):
        return 1e6 * super().forward(batch["room"]).squeeze(1)


def build(options, spec):
    return Price(4, 1)
"""


def rooms(size, seed=0, length=None):
    generator = torch.Generator().manual_seed(seed)
    return {"room": torch.randn(size, 4, generator=generator), "label": torch.randn(size, generator=generator)}


@pytest.mark.parametrize("kind", ["onnx", *further("pretrained", "torch_export")])
def test_a_model_that_tells_no_classes(tmp_path, kind):
    """Its outputs may be large, and rounding is as much larger; nothing is said of labels."""
    spec = DataSpec(modality="rooms", labels=())
    case = exporting.user_case(tmp_path, REGRESSION, spec=spec, batch=rooms)
    found = case.export(tmp_path / "e", kind).agreement
    assert found.largest_output > 1e5
    assert (found.accuracy_before, found.accuracy_after, found.labels_changed) == (None, None, 0)
    assert '{"room": ...}' in (tmp_path / "e" / "README.md").read_text()


RANDOM = exporting.MY_MODEL.replace(
    "        self.head", '        self.register_buffer("noise", torch.rand(width), persistent=False)\n        self.head'
).replace("from torch import nn", "import torch\nfrom torch import nn")


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_difference_keeps_the_old_export(tmp_path, kind, used, before):
    """Something random that is in no state dict is another one when the model is read back."""
    code = RANDOM.replace("self.head(self.body(", "self.head(self.noise + self.body(") if used else RANDOM
    folder = tmp_path / "there"
    folder.mkdir()
    if before:
        exporting.image_case().export(folder / "export", kind)
    old = listing(folder)
    with pytest.raises(ModelError, match=r"read back and differs \((in network.noise|largest .*)\); nothing was kept"):
        exporting.user_case(tmp_path, code).export(folder / "export", kind)
    assert listing(folder) == old
    assert names(folder) == (["export"] if before else [])


def test_numbers_that_do_not_fit_keep_the_old_export(case, tmp_path):
    case.export(tmp_path / "e")
    old = listing(tmp_path)
    with torch.no_grad():
        case.model.head.fc1.bias.fill_(1e6)
    with pytest.raises(ModelError, match=r"not finite; nothing was kept\n  As fp16, .*\n  its numbers have to fit"):
        case.export(tmp_path / "e", dtype="fp16")
    assert listing(tmp_path) == old
    assert case.export(tmp_path / "e", dtype="bf16").agreement.largest_output > 1e5


FULL = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import pathlib, exporting
from lockstep.base.errors import ModelError

case, root = exporting.image_case(), pathlib.Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for kind in ("safetensors", "state_dict", "torch_export"):
    try:
        case.export(root / "e", kind)
    except ModelError as error:
        print(error)
"""


def test_a_full_disk_keeps_the_old_export(case, tmp_path):
    pytest.importorskip("resource")
    case.export(tmp_path / "e")
    old = listing(tmp_path)
    told = run("-c", FULL, SUPPORT, tmp_path, cwd=tmp_path).splitlines()
    assert len(told) == 3
    assert all("cannot write the export to" in line and line.endswith("with --to") for line in told), told
    assert listing(tmp_path) == old
    assert names(tmp_path) == ["e"]


def test_another_export_replaces(case, second, tmp_path):
    case.export(tmp_path / "e", "state_dict", file="one.pt")
    second.export(tmp_path / "e", "state_dict", file="two.pt")
    assert of(tmp_path / "e", second) and not of(tmp_path / "e", case)
    assert names(tmp_path / "e") == ["README.md", "lockstep.json", "two.pt"]
    assert names(tmp_path) == ["e"]


def test_leftovers_of_a_killed_export_are_no_hindrance(case, tmp_path):
    for name in (".e.tmp", ".e.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("torn")
    case.export(tmp_path / "e")
    assert names(tmp_path) == ["e"]
    assert of(tmp_path / "e", case)


def test_an_export_that_was_killed_while_it_changed_places(case, tmp_path):
    """Between two renames the old one has another name; the next export finds it, also one that fails."""
    case.export(tmp_path / "e")
    old = listing(tmp_path)
    (tmp_path / "e").rename(tmp_path / ".e.old")
    with pytest.raises(ModelError, match="not finite"):
        with torch.no_grad():
            case.model.head.fc2.bias.fill_(float("nan"))
        case.export(tmp_path / "e")
    assert listing(tmp_path) == old


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[1])
import dataclasses, pathlib, exporting

def beside(folder):
    (folder / "tokens.txt").write_text("half of them")
    print("here", flush=True)
    time.sleep(100)

dataclasses.replace(exporting.image_case(seed=2), beside=beside).export(pathlib.Path(sys.argv[2]))
"""


def test_kill_9_in_the_middle(case, second, tmp_path):
    """While it writes, no other may; when it is killed, the old export is whole and the next one works."""
    case.export(tmp_path / "e")
    old = listing(tmp_path / "e")
    argv = [sys.executable, "-c", KILLED, SUPPORT, tmp_path / "e"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        with pytest.raises(ModelError, match="another process is just writing the export"):
            second.export(tmp_path / "e")
        assert (tmp_path / ".e.tmp" / "tokens.txt").read_text() == "half of them"
        process.kill()
    assert listing(tmp_path / "e") == old
    assert of(tmp_path / "e", case)
    second.export(tmp_path / "e")
    assert of(tmp_path / "e", second)
    assert names(tmp_path) == ["e"]


@pytest.mark.parametrize("files", [["thesis.txt"], ["config.json"], ["model.safetensors", "src/main.py"]])
def test_other_folders_are_never_replaced(case, tmp_path, files):
    target = tmp_path / "mine"
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text("mine")
    old = listing(tmp_path)
    for kind in WEIGHTS:
        with pytest.raises(
            ModelError, match="holds other files and will not be replaced; name another folder with --to"
        ):
            case.export(target, kind)
    assert listing(tmp_path) == old


def test_an_empty_folder_may_be_filled(case, tmp_path):
    (tmp_path / "empty").mkdir()
    case.export(tmp_path / "empty")
    assert is_export(tmp_path / "empty")


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_target_that_cannot_be_written(case, tmp_path, below):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match=r"cannot write the export to .*file.*name another folder with --to"):
        case.export(tmp_path / "file" / below)
    assert listing(tmp_path) == {"file": b"not a folder"}


def test_the_folder_one_is_in(case, tmp_path, monkeypatch):
    """It cannot be replaced under somebody's feet; relative paths count from it."""
    from pathlib import Path

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="is the folder that you are in"):
        case.export(Path())
    case.export(Path("below"))
    assert is_export(tmp_path / "here" / "below")
    assert names(tmp_path) == ["here"]


def test_folders_beside_the_weights(case, tmp_path):
    """As a tokenizer with several chat templates writes one."""

    def beside(folder):
        (folder / "more").mkdir()
        (folder / "more" / "a.txt").write_text("a")

    replace(case, beside=beside).export(tmp_path / "e")
    assert (tmp_path / "e" / "more" / "a.txt").read_text() == "a"
    assert (tmp_path / "e" / "more").stat().st_mode & 0o700 == 0o700


def test_a_link_to_a_folder_stays_one(case, second, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "e").symlink_to(tmp_path / "large" / "e")
    for each in (case, second):
        each.export(tmp_path / "e")
        assert (tmp_path / "e").is_symlink()
        assert of(tmp_path / "large" / "e", each)
    assert names(tmp_path / "large") == ["e"]


def test_a_lock_that_nobody_holds_is_no_hindrance(case, tmp_path):
    (tmp_path / ".e.lock").touch()
    case.export(tmp_path / "e")
    with FileLock(tmp_path / ".e.lock", timeout=0), pytest.raises(ModelError, match="another process"):
        case.export(tmp_path / "e")


@pytest.mark.parametrize("kind", ["pretrained", "safetensors", "onnx", "torch_export"])
def test_only_one_format_lets_its_file_be_named(kind):
    check(ExportSection(kind=kind))
    check(ExportSection(kind="state_dict", file="net.pth"))
    with pytest.raises(ConfigError, match=f"export.kind={kind} writes model.*"):
        check(ExportSection(kind=kind, file="net.pt"))
