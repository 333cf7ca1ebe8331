"""`lockstep replay` and `lockstep bisect`: a step gives the bits of the log on other processes, what broke it is named."""

import json
import re
import zipfile
from dataclasses import replace
from subprocess import PIPE

import pytest
import safetensors.torch
import torch
import warm
import yaml
from causal_models import saved
from members import further
from running import lockstep
from training_runs import run_on_rank

from lockstep.base.errors import ConfigError
from lockstep.checkpoint import layout
from lockstep.data.order import Order
from lockstep.recipe import recipe as recipes
from lockstep.tools.replay import replaying

MINE = '''
import numpy as np
import torch
from torch import nn

from lockstep.data.sources import _digits as digits


class Digits:
    """With a sample that is broken."""

    def __init__(self, plain, bad, fault):
        self.plain, self.bad, self.fault, self.spec, self.lengths = plain, bad, fault, plain.spec, None

    def __len__(self):
        return 256

    def __getitems__(self, indices):
        columns = self.plain.__getitems__(indices)
        image, label = np.asarray(columns["image"], np.float32) / 255, np.array(columns["label"])
        for place in np.flatnonzero(np.asarray(indices) == self.bad):
            if self.fault == "label":
                label[place] = (label[place] + 5) % 10
            elif self.fault == "bright":
                image[place] *= 40
            elif self.fault == "nan":
                image[place, 0, 2, 2] = np.nan
        return {"image": image, "label": label}


def source(options, split):
    plain = digits.build(digits.Config(kind="digits"), split)
    return Digits(plain, options.get("bad", -1) if split == "train" else -1, options.get("fault"))


def augment(sample):
    return {**sample, "image": np.roll(sample["image"], np.random.randint(-1, 2), axis=2)}


class Shift(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


class Net(nn.Module):
    def __init__(self, norm, shift):
        super().__init__()
        width = 64
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1))
        self.conv, self.shift = nn.Conv2d(1, 1, 3, padding=1), Shift(shift)
        self.norm = nn.BatchNorm2d(1) if norm else nn.Identity()
        self.head = nn.Linear(width, 10)

    def forward(self, batch):
        return self.head(self.shift(self.body(self.norm(self.conv(batch["image"])))))


def build(options, spec):
    return Net(options.get("norm", True), options.get("shift", 0.0))
'''
CONFIG = """
data: {kind: user, file: mine.py}
model: {kind: user, file: mine.py}
optim: {lr: 0.01}
train: {steps: 15, global_batch: 32, micro_batch: 8, ema: 0.9, precision: bf16}
observe: {sinks: [jsonl], log_every: 2}
checkpoint: {every_steps: 4, keep: 2, every_minutes: null}
evaluate: {every_epochs: null}
"""

ADAPTER = """
data: {kind: text, context: 24, limit: 64, tokenizer: bytes, train: texts.txt}
model: {kind: causal_lm, name: llama, adapter: {rank: 2, dropout: 0.1, targets: ['*.q_proj', '*.v_proj']}}
train: {steps: 6, global_batch: 8, micro_batch: 2, precision: bf16}
observe: {sinks: [jsonl], log_every: 3}
checkpoint: {every_steps: 2, every_minutes: null}
evaluate: {limit: 16, sample_tokens: 0, every_epochs: null}
"""

SAME = "the chain is that of the log at each step that was logged, up to step"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def trained(folder, *settings, name="one", code=0):
    done = lockstep(folder, "train", "c.yaml", f"run.name={name}", *settings)
    assert done.returncode == code, done.stdout + done.stderr


def replayed(folder, *arguments, code=0):
    """What was printed."""
    done = lockstep(folder, "replay", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def facts(folder, step):
    return json.loads((folder / f"replay-{step}.json").read_text())


def samples_of(step, samples=256):
    """The samples of a step, from 1, by shard."""
    return [
        list(map(int, rows)) for rows in Order(seed=0, samples=samples, global_batch=32, micro_batch=8).shards(step - 1)
    ]


@pytest.mark.core
def test_a_resumed_run_of_three_processes_is_replayed_on_one(folder, ranks):
    """With BatchNorm, dropout, augmentation, bf16 and an average of the weights."""
    places = [f"run.dir={folder}/runs", f"data.file={folder}/mine.py", f"model.file={folder}/mine.py"]
    config = recipes.load(folder / "c.yaml", ["run.name=one", *places]).model_dump(mode="json")
    ranks(3, run_on_rank, config, "auto", 9)
    ranks(3, run_on_rank, config)
    run = folder / "runs" / "one"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    printed = replayed(folder, "runs/one", "--step", "14", "--trust-code")
    assert "step 14 of " in printed and "2 steps again, from the checkpoint of step 12 on, and a pass" in printed
    assert f"{SAME} 14" in printed
    step = facts(folder, 14)
    logged = {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}[14]
    assert step["loss"] == logged["loss"]
    assert [row["samples"] for row in step["shards"]] == samples_of(14)
    assert len(step["samples"]) == 32 and all(row["in_shard"] for row in step["samples"])
    for row in step["shards"]:
        own = [each["total"] for each in step["samples"] if each["shard"] == row["shard"]]
        assert sum(own) == pytest.approx(row["total"], rel=1e-5)
    page = (folder / "replay-14.html").read_text()
    assert page.count("data:image/png") == 10 and "://" not in page
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    assert step["weights"][0]["ratio"] > 0


def test_other_processes_and_strategies_replay_the_same_step(folder):
    trained(folder, "launch.processes=2", "parallel.kind=fsdp")
    one = replayed(folder, "runs/one", "--step", "7")
    kept = facts(folder, 7)
    many = replayed(folder, "runs/one", "--step", "7", "--processes", "2", "--parallel", "ddp", "--out", str(folder))
    assert f"{SAME} 8" in one and "on 2 processes" in many
    assert facts(folder, 7)["samples"] == kept["samples"]


def test_an_adapter_trained_on_shards_is_replayed_on_one_process(folder):
    """LoRA with dropout in bf16, with fsdp; texts are shown as such, and the bundle needs no data."""
    (folder / "texts.txt").write_text("".join(f"number {i} has {i * 7 % 13} legs.\n\n" for i in range(200)))
    saved(folder / "llama", "llama")
    (folder / "c.yaml").write_text(ADAPTER)
    trained(folder, "launch.processes=2", "parallel.kind=fsdp")
    printed = replayed(folder, "runs/one", "--step", "5", "--save", "five.replay")
    assert f"{SAME} 6" in printed
    step = facts(folder, 5)
    assert all(len(row["text"]) >= 20 and row["in_shard"] for row in step["samples"])
    assert {"lora" in row["parameter"] for row in step["weights"]} == {True}
    (folder / "texts.txt").unlink()
    assert "are those of the bundle" in replayed(folder, "five.replay")


@pytest.mark.parametrize(("fault", "step"), [("bright", 5), *further(("label", 69))])
def test_a_broken_sample_comes_first(folder, fault, step):
    """A wrong label once the others are learned; pixels of 40 times the size when they are first met."""
    bad = samples_of(step)[2][5]
    norm = "true" if fault == "label" else "false"
    options = [f"data.options={{bad: {bad}, fault: {fault}}}", f"model.options={{norm: {norm}}}"]
    trained(folder, *options, f"train.steps={step + 1}", "checkpoint.keep=99")
    replayed(folder, "runs/one", "--step", str(step))
    first, second, *_ = facts(folder, step)["samples"]
    assert first["sample"] == bad and first["shard"] == 2
    assert first["stands_out"] > second["stands_out"]


def test_a_step_that_ended_the_run_is_opened(folder):
    bad = samples_of(6)[1][3]
    trained(folder, f"data.options={{bad: {bad}, fault: nan}}", code=3)
    printed = replayed(folder, "runs/one", "--step", "6")
    step = facts(folder, 6)
    assert [each["sample"] for each in step["samples"] if each["non_finite_inputs"]] == [bad]
    assert step["samples"][0]["sample"] == bad and not step["samples"][0]["in_shard"]
    assert "of the outputs of conv (torch.nn.Conv2d) are not finite" in printed.replace("network.", "")


def test_one_shard_and_several_steps(folder):
    trained(folder)
    replayed(folder, "runs/one", "--step", "13", "--until", "14", "--shard", "3", "--out", str(folder))
    for number in (13, 14):
        step = facts(folder, number)
        assert [row["shard"] for row in step["shards"]] == [3] and len(step["samples"]) == 8 and step["loss"] is None
    assert "--shard 9: step 13 has the shards 0, 1, 2, 3" in replayed(
        folder, "runs/one", "--step", "13", "--shard", "9", code=2
    )
    assert "has no step 16: it ends before" in replayed(folder, "runs/one", "--step", "16", code=2)
    assert "which step? Give --step N" in replayed(folder, "runs/one", code=2)


def test_another_processor_is_told_and_the_difference_measured(folder):
    trained(folder)
    run = folder / "runs" / "one"
    for checkpoint in layout.listed(run / "checkpoints"):
        manifest = layout.read_manifest(checkpoint)
        (checkpoint / "manifest.json").write_text(
            replace(manifest, numeric={**manifest.numeric, "device_model": "cpu of another kind"}).text()
        )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] == 14:
            line |= {"chain": "0" * 16, "loss": line["loss"] * (1 + 1e-6)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = replayed(folder, "runs/one", "--step", "14")
    assert "another device: " in printed and "here, cpu of another kind there" in printed
    assert "the chain differs from that of the log from step 14 on; loss by at most 1e-06, gradient norm" in printed
    (folder / "mine.py").write_text(MINE + "\n# changed\n")
    refused = replayed(folder, "runs/one", "--step", "14", "--trust-code", code=2)
    assert "the code in this file has changed" in refused
    replayed(folder, "runs/one", "--step", "14", "--trust-code", "--allow-drift")


def test_a_bundle_opens_without_data_and_checkpoints(folder, tmp_path_factory):
    (folder / "c.yaml").write_text("data: {kind: digits, limit: 256}\nmodel: {kind: cnn}\n" + CONFIG.split("\n", 3)[3])
    trained(folder, "train.precision=fp16")  # with a scale of the gradients
    replayed(folder, "runs/one", "--step", "13", "--shard", "1", "--save", "one.replay")
    empty = tmp_path_factory.mktemp("empty")
    (folder / "one.replay").rename(empty / "one.replay")
    printed = replayed(empty, "one.replay")
    assert re.search(r"all \d\d hashes of modules' outputs and of gradients are those of the bundle", printed), printed
    assert (empty / "replay-13.html").exists()
    with zipfile.ZipFile(empty / "one.replay") as archive:
        names, parts = archive.namelist(), {name: archive.read(name) for name in archive.namelist()}
    assert names == ["replay.json", "weights.safetensors", "shard-1.safetensors"]
    weights = safetensors.torch.load(parts["weights.safetensors"])
    next(iter(weights.values())).view(-1)[0] += 1e-3
    parts["weights.safetensors"] = safetensors.torch.save(weights)
    with zipfile.ZipFile(empty / "two.replay", "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    assert "step 13, shard 1: module " in replayed(empty, "two.replay", code=1)
    with zipfile.ZipFile(empty / "three.replay", "w") as archive:
        archive.writestr("replay.json", parts["replay.json"].replace(b'"spec"', b'"other"'))
    assert "is no bundle of lockstep replay --save: spec: Field" in replayed(empty, "three.replay", code=2)
    for part, said in ((b'"shards":1000000000', "less than or equal to 65536"), (b'"scale":0.0', "greater than 0")):
        name = part.partition(b":")[0]
        with zipfile.ZipFile(empty / "three.replay", "w") as archive:
            archive.writestr("replay.json", re.sub(name + rb":[\d.]+", part, parts["replay.json"]))
        assert said in replayed(empty, "three.replay", code=2)
    with zipfile.ZipFile(empty / "three.replay", "w") as archive:
        facts = json.loads(parts["replay.json"])
        recipe = yaml.safe_load(facts["recipe"])
        recipe["model"] = {"kind": "gpt", "width": 16384, "layers": 100, "heads": 2}
        recipe["data"] = {"kind": "text", "train": "words.txt", "context": 16}
        spec = {"modality": "tokens", "vocabulary": 256, "context": 16}
        wide = json.dumps({**facts, "recipe": yaml.safe_dump(recipe), "spec": spec})
        archive.writestr("replay.json", wide)
        archive.writestr("weights.safetensors", parts["weights.safetensors"])
        archive.writestr("shard-1.safetensors", parts["shard-1.safetensors"])
    assert "its settings are of a model with" in replayed(empty, "three.replay", code=2)
    with zipfile.ZipFile(empty / "three.replay", "w") as archive:
        for name, content in {**parts, "shard-1.safetensors": safetensors.torch.save({"other": torch.ones(1)})}.items():
            archive.writestr(name, content)
    assert "the samples of the bundle do not fit its model (KeyError: " in replayed(empty, "three.replay", code=2)
    (empty / "three.replay").write_bytes(b"no archive")
    assert "three.replay is no bundle of lockstep replay --save" in replayed(empty, "three.replay", code=2)


def test_a_folder_that_is_missing_is_told_before_a_bundle_is_run(tmp_path):
    nowhere = {"out": tmp_path / "none", "overrides": (), "trusts": False, "here": None, "console": None}
    with pytest.raises(ConfigError, match="--out .*none/replay.html: there is no folder"):
        replaying.open_bundle(tmp_path / "one.replay", replaying.ReplayRequest(), **nowhere)


def test_the_debugger_stops_in_the_users_forward(folder):
    trained(folder)
    words = ["lockstep", "replay", "runs/one", "--step", "13", "--shard", "2", "--pdb"]
    answers = []
    for typed in ("p tuple(batch['image'].shape)\np type(self).__name__\nc\n", "q\n"):
        process = warm.Popen(words, cwd=folder, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
        answers.append((*process.communicate(typed, timeout=100), process.returncode))
    assert answers[0][2] == 0 and "(8, 1, 8, 8)" in answers[0][0] and "'Net'" in answers[0][0], answers
    assert answers[1][1:] == ("the debugger was left\n", 75)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.options={shift: 1.0e-6}", r"step 1, shard 0: module network.shift \(Shift, .*mine.py:\d+\) gave other"),
        ("data.options={bad: BAD, fault: bright}", r"step 5, shard 1: the data \(image\) differs"),
        ("optim.beta2=0.9", r"step [23]: the weights before it differ, first of them network.body.1.weight"),
    ],
)
def test_bisect_names_what_differs_first(folder, change, named):
    trained(folder, "checkpoint.every_steps=2", "checkpoint.keep=9")
    trained(folder, change.replace("BAD", str(samples_of(5)[1][0])), name="two")
    done = lockstep(folder, "bisect", "runs/one", "runs/two")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(named, done.stdout), done.stdout


def test_bisect_of_equal_runs(folder):
    trained(folder)
    trained(folder, "launch.processes=2", name="two")
    done = lockstep(folder, "bisect", "runs/one", "runs/two")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the chains are equal up to step 15" in done.stdout
