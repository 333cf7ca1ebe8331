"""Texts that are empty or too long, and classes named like a missing value: a run says so at its start."""

import csv

import pytest
from exporting import TEXTS, text_case
from running import lockstep

from lockstep.base.errors import ModelError
from lockstep.models import _transformer as transformer

SETTINGS = ["data.kind=files", "data.train=rows.csv", "data.test=rows.csv", "model.kind=transformer", "model.name=tiny"]
SHORT = ["train.steps=2", "train.global_batch=8", "train.micro_batch=4", "launch.processes=1", "run.name=a"]


@pytest.fixture
def train(tmp_path, minilm):
    text_case(tmp_path / "tiny", minilm)

    def run(rows, *words):
        with open(tmp_path / "rows.csv", "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        (tmp_path / "c.yaml").write_text("")
        done = lockstep(tmp_path, "train", "c.yaml", *SETTINGS, *SHORT, *words)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def test_what_is_odd_about_training_texts_is_told(train):
    rows = [(f"this is text {n}", "no" if n % 2 else "yes") for n in range(20)]
    rows[3], rows[7], rows[8] = ("", "no"), ("   ", "no"), ("a good word " * 40, "None")
    code, said = train(rows, "model.max_length=24")
    assert code == 0, said
    assert "2 of 20 training texts are empty, the first is sample 3" in said
    assert "1 of 20 training texts have 24 tokens or more: what is beyond model.max_length=24 is cut off" in said
    assert "'None' is a class, of samples with that text as their label" in said


def test_nothing_is_told_of_good_ones(train):
    code, said = train([(f"this is text {n}", "no" if n % 2 else "yes") for n in range(20)], "model.max_length=24")
    assert code == 0 and "training texts" not in said and "is a class" not in said, said


OWN = """
import torch
from torch import nn

from lockstep import DataSpec


class Texts:
    spec, lengths = DataSpec(modality="text", labels=("a", "b")), None

    def __len__(self):
        return 16

    def __getitem__(self, row):
        return {"text": f"text {row}", "label": row % 2}


def collate(samples):
    ids = torch.tensor([[ord(letter) % 7 for letter in sample["text"][:6]] for sample in samples])
    return {"ids": ids, "label": torch.tensor([sample["label"] for sample in samples])}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, batch):
        return self.layer(batch["ids"].float())


def source(options, split):
    return Texts()


def build(options, spec):
    return Network()
"""


def test_an_own_model_of_texts_is_said_to_be_for_training_alone(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "c.yaml").write_text("data: &own {kind: user, file: mine.py}\nmodel: *own\n")
    done = lockstep(tmp_path, "train", "c.yaml", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predict and serve cannot use this model: for texts they need the tokenizer" in done.stdout + done.stderr


def test_a_length_without_positions_is_refused(tmp_path, minilm):
    """Also where every text is short."""
    text_case(tmp_path / "tiny", minilm)
    section = {"kind": "transformer", "name": str(tmp_path / "tiny")}
    assert transformer.build(transformer.Config(**section, max_length=32), TEXTS) is not None
    with pytest.raises(ModelError, match=r"model.max_length=33 is more tokens than .* has positions for \(32; "):
        transformer.build(transformer.Config(**section, max_length=33), TEXTS)


def test_the_end_that_is_cut_off_is_that_of_the_tokenizer_in_the_export_too(tmp_path, minilm):
    """Of another end there are other tokens, also in the cache."""
    from transformers import AutoTokenizer

    found, text = {}, " ".join(["one two three four five six seven"] * 9)
    for side in ("left", "right"):
        text_case(tmp_path / side, minilm)
        AutoTokenizer.from_pretrained(minilm, truncation_side=side).save_pretrained(tmp_path / side)
        ours = transformer.tokenizer(transformer.Config(kind="transformer", name=str(tmp_path / side), max_length=12))
        ours.save(tmp_path / f"{side}-export")
        exported = AutoTokenizer.from_pretrained(tmp_path / f"{side}-export")
        found[side] = ours.key, (ids := ours([text])[0].tolist())
        assert exported(text, truncation=True)["input_ids"] == ids
    assert len({key for key, _ in found.values()}) == 2
    assert found["left"][1][1:-1] != found["right"][1][1:-1]
