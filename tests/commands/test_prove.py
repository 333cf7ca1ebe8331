"""`lockstep prove` on real runs: a sound config passes, planted culprits are named, and nothing is left behind."""

import os
import re
import signal
import subprocess
import time

import psutil
import pytest
import warm as warm_process
from proofs import proof_of
from running import left_of

from lockstep.tools.prove.proving import half_time

PROVE = ["lockstep", "prove", "c.yaml"]
MODEL = """
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Ranked(nn.Module):
    def forward(self, x):
        return x + 1e-3 * torch.distributed.get_rank()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + torch.distributed.get_rank())


class Backward(nn.Module):
    def forward(self, x):
        return Scaled.apply(x)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.01 * torch.from_numpy(np.random.default_rng().normal(size=tuple(x.shape))).to(x)


class Sound(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2, self.training)


class Network(nn.Module):
    def __init__(self, pixels, classes, odd):
        super().__init__()
        layers = [nn.Flatten(), nn.Linear(pixels, 16), nn.BatchNorm1d(16), odd, nn.ReLU(), nn.Dropout(0.2)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, classes)

    def forward(self, batch):
        return self.head(self.body(batch["image"] / 255))


def build(options, spec):
    odd = {"rank": Ranked, "backward": Backward, "batch": Centred, "numpy": Noisy}.get(options.get("odd"), Sound)()
    return Network(math.prod(spec.image_shape), len(spec.labels), odd)


def loss(outputs, batch):
    from lockstep.base.model_contracts import LossSum

    total = F.cross_entropy(outputs, batch["label"], reduction="sum")
    return LossSum(total / (len(outputs) if options_mean else 1), len(outputs))


options_mean = False
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A config and a user's model, and a folder for temporary files of its own."""
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "c.yaml").write_text(
        "data: {kind: digits, limit: 200}\ntrain: {global_batch: 32, micro_batch: 8}\nschedule: {warmup: 0.1}\n"
    )
    (tmp_path / "tmp").mkdir()
    return tmp_path


def own(odd, *extra):
    return ["model.kind=user", "model.file=my_model.py", f"model.options.odd={odd}", *extra]


def prove(folder, *arguments, code):
    """Run the command to its end -> what it printed; nothing may be left of its runs."""
    done = warm_process.run([*PROVE, *arguments], cwd=folder, env=environment(folder), timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    nothing_is_left(folder)
    return done.stdout + done.stderr


def environment(folder):
    return {**os.environ, "TMPDIR": str(folder / "tmp"), "COLUMNS": "140"}


def nothing_is_left(folder):
    assert not (folder / "runs").exists()
    assert not list((folder / "tmp").glob("lockstep-prove-*"))


def line_of(name):
    return MODEL.splitlines().index(f"class {name}(nn.Module):") + 1


def flat(text):
    """Without the table's lines: its cells' words, one blank between them."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [("repeat", "kill"), pytest.param((), marks=pytest.mark.matrix)], ids=["some", "all"])
def test_a_sound_config_is_proven(folder, parts):
    """The kill really happened. The model is the one of the culprits, without one. (The other parts, in processes that
    are warm: test_prove_strategies.py.)"""
    asked = [word for part in parts for word in ("--only", part)]
    output = prove(folder, *own("none"), "--steps", "6", *asked, code=0)
    rows = ["the same micro-batch", "the split of a step", "killed on W = 2", "runs of equal weights"]
    if not parts:
        rows += ["W = 2: weights", "W = 4: weights", "each test sample"]
        rows += [f"parallel.kind={kind}, W = " for kind in ("single", "ddp", "fsdp", "pipeline")]
    assert all(row in output for row in rows), output
    assert "BatchNorm on running statistics" in flat(output)
    assert output.count(" shown ") == len(rows)
    assert "DIFFERS" not in output and "not shown" not in output, output
    assert re.search("ended by SIGKILL .* 6 of 6, in mid-epoch; resumed after step 4", flat(output)), output
    assert f"{len(rows)} of {len(rows)} shown, none differs." in output


@pytest.mark.parametrize("steps", range(4, 20))
@pytest.mark.parametrize("epoch", [1, 2, 3, 7])
def test_the_kill_is_in_mid_epoch_where_there_is_a_middle(steps, epoch):
    every = half_time(steps, epoch)
    assert 0 < every < every + 1 < steps
    if epoch == 3 or (epoch == 7 and steps > 7):
        assert every % epoch and (every + 1) % epoch


def test_a_module_that_mixes_samples_is_named(folder):
    """BatchNorm and dropout, as layer and as function, stand beside it and are not taken for it."""
    output = prove(folder, *own("batch"), "--only", "repeat", "--keep", "kept", code=1)
    assert f"module network.body.3 (Centred, {folder}/my_model.py:{line_of('Centred')}) mixes the samples" in output
    assert (folder / "kept" / "single-batches" / "rows.json").is_file()


def warm(ranks, folder, odd="none", **sections):
    """A proof whose runs are made in processes that are warm."""
    model = {"kind": "user", "file": str(folder / "my_model.py"), "options": {"odd": odd}}
    return proof_of(ranks, folder, model=model, **sections)


def test_a_module_that_uses_the_rank_is_named(ranks, folder):
    """By the run itself, so that nothing has to be run again."""
    proof = warm(ranks, folder, "rank")
    row, *_ = proof.rows(("worlds",))
    assert row.result == "DIFFERS" and "from step 1 on" in row.digest
    assert f"module network.body.3 (Ranked, {folder}/my_model.py:{line_of('Ranked')}) gave other outputs" in row.cause
    assert "its rank" in row.cause
    assert not any("traced" in said for said in proof.said)


def test_a_backward_pass_that_uses_the_rank_is_named(ranks, folder):
    """The look before the first step sees forward passes only: both worlds are run again, and traced."""
    row, *others = warm(ranks, folder, "backward").rows(("worlds", "evaluate"))
    assert "step 1, shard 2: all modules gave equal outputs but the gradient of network.body.2." in row.cause
    assert [each.result for each in others] == ["not shown"] * 3  # what rests on equal weights


def test_an_unseeded_draw_is_named(ranks, folder):
    first, _ = warm(ranks, folder, "numpy").rows(("repeat",))
    assert f"module network.body.3 (Noisy, {folder}/my_model.py:{line_of('Noisy')}) gave other outputs" in first.cause
    assert "numpy.random.default_rng()" in first.cause


def test_an_unseeded_augmentation_is_found(ranks, folder):
    """A proof trains on part of the samples, and they are augmented as in training."""
    (folder / "bad.py").write_text(
        "import numpy as np\n\n\ndef augment(sample):\n"
        "    noise = np.random.default_rng().integers(0, 5, sample['image'].shape, dtype=np.uint8)\n"
        "    return {**sample, 'image': sample['image'] // 2 + noise}\n"
    )
    first, _ = warm(ranks, folder, data={"augment": str(folder / "bad.py")}).rows(("repeat",))
    assert "the data (image) is not the same when the same samples are fetched again" in first.cause


def test_a_loss_that_is_a_mean_is_named(ranks, folder):
    file = folder / "my_model.py"
    file.write_text(MODEL.replace("options_mean = False", "options_mean = True"))
    _, split = warm(ranks, folder).rows(("repeat",))
    assert split.result == "DIFFERS" and "the loss is no sum over its samples" in split.cause


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["train.epoch=3"], "did you mean 'epochs'?"),
        (["--only", "kil"], "did you mean 'kill'?"),
        (["--keep", "tmp"], "name a folder that is not there yet"),
        (["model.kind=user", "model.file=no.py", "--only", "worlds"], "there is no file"),
    ],
)
def test_mistakes_are_told(folder, arguments, fragment):
    assert fragment in prove(folder, *arguments, code=2)


def test_a_run_that_fails_is_repeated(folder):
    """The user's own error, with its traceback, is what is shown."""
    file = folder / "my_model.py"
    file.write_text(MODEL.replace("return x - x.mean(0)", "raise ValueError('no such thing')"))
    words = [*PROVE, *own("batch"), "--only", "worlds"]
    done = warm_process.run(words, cwd=folder, env=environment(folder), timeout=160)
    assert done.returncode == 1
    assert "ValueError: no such thing" in done.stderr and "run world-1 on 1 process" in done.stderr
    nothing_is_left(folder)


def test_a_signal_ends_all_runs_and_leaves_nothing(folder):
    process = warm_process.Popen(
        [*PROVE, "--only", "worlds", "--steps", "100000"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and not list((folder / "tmp").glob("lockstep-prove-*/world-1/metrics.jsonl")):
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    assert [p for p in family if p.name().startswith("lockstep-r")]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not left_of(family, 10)
    nothing_is_left(folder)
