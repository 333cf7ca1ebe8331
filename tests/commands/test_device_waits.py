"""What a training step, and a micro-batch of an evaluation, would wait for a GPU for: nothing."""

import json

import pytest
import warm
from exporting import text_case
from running import need_forks

TRAIN = """
train: {steps: 6, global_batch: 8, micro_batch: 4}
checkpoint: {every_steps: 100}
observe: {log_every: 100, sinks: [jsonl]}
launch: {processes: 1, kind: local}
"""
DATA = {
    "cnn": "data: {kind: digits, limit: 100}\nmodel: {kind: cnn}\n",
    "texts": "data: {kind: files, train: texts.csv, test: texts.csv}\n"
    "model: {kind: transformer, name: bert, max_length: 16}\n",
    "gpt": "data: {kind: text, train: poem.txt, context: 16, tokenizer: bytes}\n"
    "model: {kind: gpt, width: 16, heads: 2, layers: 2}\n",
}


OF_TRANSFORMERS = "/models/_transformer.py"
"""Which looks, once in each forward pass, whether a mask hides anything: without padding its attention is faster."""
MANNERS = {
    "fp32": [],
    "bf16": ["train.precision=bf16", "optim.clip=1.0"],
    "fp16": ["train.precision=fp16", "train.ema=0.9"],
}


def waits(folder, minilm, model, *settings):
    """What two steps and the evaluation would wait for, by line."""
    need_forks()
    (folder / "c.yaml").write_text(DATA[model] + TRAIN)
    if model == "texts":
        text_case(folder / "bert", minilm)
    (folder / "poem.txt").write_text("".join(f"The rain of day {day} stays in the plain.\n\n" for day in range(400)))
    (folder / "texts.csv").write_text("text,label\n" + "good news,a\nall is lost,b\n" * 20)
    done = warm.run(["counting_lockstep", "waits.json", "train", "c.yaml", *settings], cwd=folder, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "waits.json").read_text())
    return {line: number for line, number in found.items() if not line.startswith(OF_TRANSFORMERS)}


SQUARE = [("texts", "fsdp")], [("gpt", "fsdp")], [("cnn", "ddp")]
CASES = [
    pytest.param(model, strategy, manner, marks=[] if (model, strategy) in daily else pytest.mark.matrix)
    for manner, daily in zip(MANNERS, SQUARE, strict=True)
    for model in DATA
    for strategy in ("ddp", "fsdp")
]


@pytest.mark.parametrize(("model", "strategy", "manner"), CASES)
def test_no_step_waits(tmp_path, minilm, model, strategy, manner):
    assert waits(tmp_path, minilm, model, f"parallel.kind={strategy}", *MANNERS[manner]) == {}


def test_a_step_that_may_be_left_out_waits_once(tmp_path, minilm):
    """The host decides whether the optimizer runs."""
    ((line, number),) = waits(tmp_path, minilm, "cnn", "train.non_finite=skip").items()
    assert line.startswith("/training/step.py")
    assert number == 2
