"""A run on real AG News, exported, and read by three libraries that know nothing of Lockstep: the same labels."""

import csv
import subprocess
import sys

import numpy as np
import pytest
import torch
from places import EXAMPLES

from lockstep.inference.trained_model import open_predictor

BATCH = 50


@pytest.fixture(scope="module")
def exports(tmp_path_factory, shared_data, minilm):
    """Folders by kind, of one short training run."""
    folder = tmp_path_factory.mktemp("news")

    def lockstep(*arguments):
        command = [sys.executable, "-m", "lockstep", *map(str, arguments)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=600)

    settings = [
        f"data.root={shared_data}",
        f"model.name={minilm}",
        "train.epochs=null",
        "train.precision=fp32",  # fast on any processor
        "train.steps=60",
        "run.name=ag",
    ]
    lockstep("train", settings_file(), *settings)
    kinds = {"pretrained": "export", "onnx": "export-onnx", "torch_export": "export-torch_export"}
    for kind in kinds:
        lockstep("export", "runs/ag", f"export.kind={kind}")
    return {kind: folder / "runs" / "ag" / name for kind, name in kinds.items()}


def settings_file():

    return EXAMPLES / "ag_news.yaml"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_same_labels_on_every_document(exports, shared_data):
    """7,600 of them: plain transformers, plain onnxruntime, plain torch, and the Predictor."""
    import onnxruntime
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with (shared_data / "ag_news" / "test.csv").open(encoding="utf-8") as file:
        rows = [(int(row[0]) - 1, f"{row[1]} {row[2]}") for row in csv.reader(file)]
    assert len(rows) == 7600
    tokenizer = AutoTokenizer.from_pretrained(exports["pretrained"])
    plain = AutoModelForSequenceClassification.from_pretrained(exports["pretrained"]).eval()
    session = onnxruntime.InferenceSession(exports["onnx"] / "model.onnx", providers=["CPUExecutionProvider"])
    program = torch.export.load(exports["torch_export"] / "model.pt2").module()
    own = open_predictor(exports["pretrained"])
    found = {
        name: np.empty((len(rows), 4), np.float32) for name in ("transformers", "onnxruntime", "torch", "lockstep")
    }
    order = np.argsort([len(text) for _, text in rows], kind="stable")
    for start in range(0, len(rows), BATCH):
        part = order[start : start + BATCH]
        texts = [rows[row][1] for row in part]
        batch = tokenizer(texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        with torch.inference_mode():
            found["transformers"][part] = plain(input_ids=ids, attention_mask=mask).logits
            found["torch"][part] = program(ids, mask)
        found["onnxruntime"][part] = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        found["lockstep"][part] = own.logits(own.encode(texts))
    labels = {name: logits.argmax(1) for name, logits in found.items()}
    for name, logits in found.items():
        largest = np.abs(logits - found["transformers"]).max()
        changed = int((labels[name] != labels["transformers"]).sum())
        accuracy = (labels[name] == [label for label, _ in rows]).mean()
        sys.stdout.write(f"{name}: accuracy {accuracy:.4f}, {changed} other labels, largest difference {largest:.2g}\n")
    assert all((each == labels["transformers"]).all() for each in labels.values())
    assert plain.config.id2label[0] == own.labels[0]
