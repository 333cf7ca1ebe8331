"""The scripts with familiar flags: under `python` and torchrun the same weights, and weights that others can load."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
import warm
from places import ROOT
from running import wait_for_steps

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.core.numerics.digest import digest as digest_of

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FORKED = ()
"""Stands for `python` where a test is not about how a script starts."""
DIGITS = ["--data", "digits", "--num_samples", "300", "--batch_size", "16", "--seed", "3"]


def started(folder, script, *words, launcher=(sys.executable,)):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*launcher, ROOT / "scripts" / script, *map(str, words)]
    opened = warm.Popen if launcher == FORKED else subprocess.Popen
    return opened(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, **pipes)


def ran(folder, script, *words, code=0, launcher=(sys.executable,)):
    """Run a script to its end -> standard output, errors."""
    with started(folder, script, *words, launcher=launcher) as process:
        try:
            output, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == code, output + errors
    return output, errors


def weights(file):
    return torch.load(file, weights_only=True)


def recipe(folder, section):
    """A section of the settings that the only run in a folder was trained with."""
    (found,) = (folder / "runs").glob("*/summary.json")
    import yaml

    return yaml.safe_load((found.parent / "recipe.yaml").read_text())[section]


def cnn(shape):
    plugin = plugins.implementation("models", "cnn")
    spec = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=shape)
    return plugin.build(plugin.Config(kind="cnn"), spec)


def test_mnist_under_python_and_torchrun(tmp_path):
    """On another number of processes, and by other words for the same flags: the same weights."""
    for name, launcher, more in (
        ("one", [sys.executable], ["--nprocs=1", "--batch-size", "16"]),
        ("two", FORKED, ["--world-size", "2", "--no-cuda"]),
        ("torchrun", TORCHRUN, ["--global-batch-size", "32", "--output", "deep/er/mnist_cnn.pt"]),
    ):
        (tmp_path / name).mkdir()
        output, _ = ran(tmp_path / name, "mnist_ddp.py", *DIGITS, "--epochs=2", *more, launcher=launcher)
        assert output.count("finished after ") == 1
    one, two = (weights(tmp_path / name / "mnist_cnn.pt") for name in ("one", "two"))
    three = weights(tmp_path / "torchrun" / "deep" / "er" / "mnist_cnn.pt")
    assert digest_of(one) == digest_of(two) == digest_of(three)
    assert f"digest {digest_of(one)}\n" in output
    cnn((1, 8, 8)).load_state_dict(three)
    assert recipe(tmp_path / "two", "train")["global_batch"] == 32


@pytest.mark.matrix
def test_text_under_python_and_torchrun(tmp_path, shared_data, minilm):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    words = ["--num_samples=24", "--epochs=1", "--batch-size=4", "--gradient_accumulation_steps=2", "--max_length=16"]
    words += ["--model_name", minilm, "--data_dir", shared_data, "--bf16"]
    ran(tmp_path, "train_ddp.py", *words, "--nprocs=2")
    assert recipe(tmp_path, "train")["global_batch"] == 16
    assert recipe(tmp_path, "train")["precision"] == "bf16"
    state = weights(tmp_path / "distilbert_agnews.pt")
    ran(tmp_path, "train_ddp.py", *words, "--output=again.pt", launcher=TORCHRUN)
    assert digest_of(weights(tmp_path / "again.pt")) == digest_of(state)
    model = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=4)
    before = digest_of(model.state_dict())
    assert not any(model.load_state_dict(state))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "distilbert_agnews_tokenizer")
    assert tokenizer("a film")["input_ids"] == AutoTokenizer.from_pretrained(minilm)("a film")["input_ids"]
    assert digest_of(model.state_dict()) != before


def test_mnist_itself_and_one_step(tmp_path, shared_data):
    words = ["--data-dir", shared_data, "--num-samples", "64", "--dry-run", "--no-save-model", "--gamma", "1"]
    words += ["--log-interval=1", "--test-batch-size=32", "parallel.kind=single"]
    ran(tmp_path, "mnist_ddp.py", *words, launcher=FORKED)
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 1
    assert not list(tmp_path.glob("*.pt"))


def test_gamma_lowers_the_rate_after_each_epoch(tmp_path):
    words = [*DIGITS, "--epochs=3", "--gamma=0.5", "--lr=0.01", "--log-interval=1", "--nprocs=1"]
    ran(tmp_path, "mnist_ddp.py", *words, launcher=FORKED)
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    rates = [
        line["learning_rate"] for line in map(json.loads, metrics.read_text().splitlines()) if "learning_rate" in line
    ]
    assert len(rates) == 30
    assert rates[:11] == [0.01] * 11
    assert rates[11:21] == pytest.approx([0.005] * 10)
    assert rates[21:] == pytest.approx([0.0025] * 9)


@pytest.mark.matrix
def test_resume_goes_on_with_the_run(tmp_path):
    words = [*DIGITS, "--epochs=60", "--log-interval=1", "--nprocs=2"]
    ran(tmp_path, "mnist_ddp.py", *words, "--run-dir=whole", "--output=whole.pt")
    process = started(tmp_path, "mnist_ddp.py", *words)
    try:
        while not (found := list((tmp_path / "runs").glob("*/metrics.jsonl"))):
            assert process.poll() is None
            time.sleep(0.05)
        wait_for_steps(found[0].parent, 12)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert "Traceback" not in errors
    output, _ = ran(tmp_path, "mnist_ddp.py", *words, "--resume", found[0].parent)
    assert "resumed after step" in output
    assert digest_of(weights(tmp_path / "mnist_cnn.pt")) == digest_of(weights(tmp_path / "whole.pt"))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--epoch_s=3"], "unrecognized arguments: --epoch-s=3 (--help lists the flags)"),
        (["--epochs=two"], "argument --epochs: invalid float value: 'two'"),
        (["--fp16", "--bf16"], "argument --bf16: not allowed with argument --fp16"),
        (["--gamma=0"], "--gamma 0: it should be above 0"),
        (["--resume=runs/none"], "--resume runs/none: there is no run in this folder"),
        (["--backend=nccl", "--no-cuda"], "--backend nccl does not go with --device cpu"),
        (["--backend=nccl"], "there is no GPU: leave out --device and --backend"),
        (["--global-batch-size=8"], "train.micro_batch: 64 is more than train.global_batch"),
        (["--output=weights.txt"], "export.file: "),
        (["trian.epochs=3"], "command line: trian: unknown key — did you mean 'train'?"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, words, fragment):
    output, errors = ran(tmp_path, "mnist_ddp.py", *words, code=2)
    assert output == ""
    assert errors.count(fragment) == 1
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_mistakes_are_told_once(tmp_path):
    """By one of the processes under torchrun; and not again by the script when a process has told it."""
    for words, fragment in ((["--nprocs=3"], "leave out --nprocs"), (["--epochs=0"], "train.epochs: ")):
        _, errors = ran(tmp_path, "mnist_ddp.py", *words, code=1, launcher=TORCHRUN)
        assert errors.count(fragment) == 1, errors
    words = ["--model_name=./none", "--data_dir", tmp_path, "--nprocs=2"]
    (tmp_path / "train.csv").write_text('"1","a","b"\n')
    (tmp_path / "test.csv").write_text('"1","a","b"\n"9","a","b"\n')
    _, errors = ran(tmp_path, "train_ddp.py", *words, code=2, launcher=FORKED)
    assert errors.count("row 2 of ") == 1, errors


@pytest.mark.matrix
def test_notebook(tmp_path):
    """Its cells, one after the other in one process, on two processes and without a network."""
    notebook = json.loads((ROOT / "docs" / "notebooks" / "train_on_two_gpus.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    show = "sys.stdout.write('the notebook has finished\\n')"
    text = "\n".join(["".join(cell["source"]) for cell in cells] + [show])
    (tmp_path / "cells.py").write_text(text)
    offline = {"https_proxy": "http://127.0.0.1:9", "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the notebook has finished\n")
    found = [
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("two", "short-1", "short-2")
    ]
    assert [each["world_size"] for each in found] == [2, 1, 2]
    assert found[1]["digest"] == found[2]["digest"]
    assert found[0]["evaluation"]["accuracy"] > 0.9
    assert (tmp_path / "labels.parquet").is_file()
