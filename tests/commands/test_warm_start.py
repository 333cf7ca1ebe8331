"""model.init: weights of runs, exports and files, by name; what does not fit is reported."""

import json
import re

import pytest
import torch
from running import lockstep, summary
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from lockstep.base.contracts import DataSpec
from lockstep.models import _cnn as cnn
from lockstep.recipe.warm_start import warm_start

CONFIG = {
    "data": {"kind": "digits", "limit": 64},
    "model": {"kind": "cnn"},
    "train": {"steps": 3, "global_batch": 16, "micro_batch": 4},
    "optim": {"lr": 0.01},
    "run": {"seed": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run, its exports, and its weights in files as others save them."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    train(folder, "a", "train.ema=0.5")
    for kind in ("pretrained", "state_dict"):
        done = lockstep(folder, "export", "runs/a", "--to", kind, f"export.kind={kind}")
        assert done.returncode == 0, done.stdout + done.stderr
    weights = torch.load(folder / "state_dict" / "model.pt")
    save_file({f"module.model.{name}": value for name, value in weights.items()}, folder / "wrapped.safetensors")
    torch.save({"epoch": 3, "state_dict": weights, "name": "x"}, folder / "trainer.ckpt")
    other = {name: value for name, value in weights.items() if "conv1" not in name}
    other["head.fc2.weight"], other["more.bias"] = torch.zeros(3, 128), torch.zeros(2)
    torch.save(other, folder / "other.pt")
    torch.save({"hidden": torch.zeros(2)}, folder / "nothing.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"model": re.compile("x")}, folder / "code.pt")
    return folder


def train(folder, name, *settings, code=0):
    done = lockstep(folder, "train", "c.yaml", f"run.name={name}", "launch.processes=1", *settings)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "path",
    [
        "runs/a",
        "runs/a/checkpoints/step-000000003",
        "pretrained",
        "state_dict/model.pt",
        "wrapped.safetensors",
        "trainer.ckpt",
    ],
)
def test_weights_are_those_of_the_path(folder, path):
    """A step at a vanishing rate leaves them; two processes and fsdp start with the same."""
    still = ["optim.lr=1e-30", "optim.weight_decay=0", "train.steps=1", f"model.init={path}"]
    name = re.sub(r"\W", "-", path)
    said = train(folder, name, *still)
    assert "model.init: 8 of the model's 8 weights and buffers are from " in said
    assert "so they start as without it" not in said
    assert summary(folder, name)["digest"] == summary(folder, "a")["digest"]


class TutorialNet(nn.Module):
    """As in PyTorch's MNIST example, for images of 8x10."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.fc1, self.fc2 = nn.Linear(64 * 2 * 3, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_by_the_names_of_the_tutorial_give_the_same_outputs(tmp_path, prefix):
    """fc1 reads the features there in another order."""
    tutorial = TutorialNet()
    state = {f"{prefix}{name}": value for name, value in tutorial.state_dict().items()}
    torch.save(state, tmp_path / "mnist_cnn.pt")
    images = torch.randint(0, 256, (5, 1, 8, 10), dtype=torch.uint8)
    wanted = tutorial((images / 255 - 0.1307) / 0.3081)
    spec = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=(1, 8, 10))
    loaded, started = (cnn.build(cnn.Config(kind="cnn"), spec).eval() for _ in range(2))
    assert not any(loaded.load_state_dict(state))
    assert not any(loaded.load_state_dict(loaded.state_dict()))
    assert len(warm_start(started, tmp_path / "mnist_cnn.pt").notes) == 1
    for model in (loaded, started):
        torch.testing.assert_close(model({"image": images}), wanted, rtol=1e-4, atol=1e-5)


def test_the_start_is_the_same_on_several_processes(folder):
    digests = set()
    for name, settings in {
        "one": [],
        "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
        "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
    }.items():
        train(folder, name, "model.init=runs/a", *settings)
        digests.add(summary(folder, name)["digest"])
    train(folder, "cold")
    assert len(digests) == 1 and summary(folder, "cold")["digest"] not in digests


def test_what_does_not_fit_is_reported(folder):
    said = train(folder, "partly", "model.init=other.pt")
    assert "model.init: 5 of the model's 8 weights and buffers are from " in said
    assert "not in it, so they start as without it: features.conv1.weight, features.conv1.bias" in said
    assert "of another shape, so they start as without it: head.fc2.weight (10x128 here, 3x128 there)" in said
    assert "in it, but not in the model: more.bias" in said


@pytest.mark.parametrize("path", ["runs/a", "pretrained"])
def test_other_classes_are_told(folder, path):
    digits = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=(1, 8, 8))
    for classes in (digits.labels, digits.labels[::-1]):
        notes = warm_start(cnn.build(cnn.Config(kind="cnn"), digits), folder / path, classes).notes
        is_told = any(
            "was trained on the classes 0, 1, 2 and 7 more, and the data has 9, 8, 7" in note for note in notes
        )
        assert is_told == (classes != digits.labels)


def test_other_weights_are_another_run(folder):
    """A resume notices that the file holds other weights than those that the run began with."""
    for name in ("x", "y"):
        torch.save({"features.conv1.bias": torch.full((32,), float(ord(name)))}, folder / f"{name}.pt")
    train(folder, "r", "model.init=x.pt", "train.steps=2", "schedule.shape=constant")
    assert "model.init_digest" in train(
        folder, "r", "model.init=y.pt", "train.steps=3", "schedule.shape=constant", code=2
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("runs/b", "there is no run, no export and no file of weights"),
        ("nothing.pt", "none of its 1 weights fits the model: it has hidden, the model features.conv1.weight"),
        ("list.pt", "holds no state dict"),
        ("code.pt", "cannot be read as a state dict without executing code"),
        ("c.yaml", "weights are in files that end in .safetensors"),
    ],
)
def test_mistakes_are_answered_with_the_repair(folder, path, says):
    said = train(folder, "wrong", f"model.init={path}", code=2)
    assert says in " ".join(said.split()) and "Traceback" not in said
