"""Every format holds every kind of model: what others read with their own tools predicts the same, on any batch."""

import shutil
import subprocess
import sys

import exporting
import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
from safetensors.torch import load_file
from torch.onnx._internal.exporter import _onnx_program

from lockstep.base import plugins, trust
from lockstep.base.errors import ConfigError, MissingExtra, ModelError
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_reader import forward_of, tokenizer_of
from lockstep.inference.export.round_trip import TOLERANCE
from lockstep.recipe.export_config import FORMATS

KINDS = ("onnx", "pretrained", "safetensors", "state_dict", "torch_export")
FILES = {
    "onnx": "model.onnx",
    "pretrained": "model.safetensors",
    "safetensors": "model.safetensors",
    "state_dict": "model.pt",
    "torch_export": "model.pt2",
}
CASES = ("cnn", "user", "transformer")


@pytest.fixture(scope="module")
def cases(tmp_path_factory, minilm):
    folder = tmp_path_factory.mktemp("models")
    (folder / "bert").mkdir()
    return {
        "cnn": exporting.image_case(),
        "user": exporting.user_case(folder),
        "transformer": exporting.text_case(folder / "bert", minilm),
    }


@pytest.fixture(scope="module")
def exported(cases, tmp_path_factory):
    """(case, kind, dtype) -> its folder; each is written once."""
    root, done = tmp_path_factory.mktemp("exports"), {}

    def folder(case, kind, dtype="fp32"):
        if (case, kind, dtype) not in done:
            target = done[case, kind, dtype] = root / f"{case}-{kind}-{dtype}"
            cases[case].export(target, kind, dtype=dtype)
        return done[case, kind, dtype]

    return folder


def test_the_formats_are_these():
    assert plugins.names(FORMATS) == ["adapter", *KINDS]  # the first is that of models with one: test_adapters.py


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_any_batch_gives_what_the_model_gives(cases, exported, name, kind):
    """Other sizes and lengths than those that the export was made and checked with, one of them longer."""
    case, forward = cases[name], forward_of(exported(name, kind))
    for size, length in [(1, 3), (2, 24), (7, 8), (33, 11)]:
        batch = case.batch(size, seed=100 + size, length=length)
        expected = case.logits(batch)
        with torch.no_grad():
            found = forward(batch)
        difference = float((expected - found).abs().max())
        assert difference <= 1e-5
        assert found.shape == (size, len(case.spec.labels))
        assert size == 1 or expected.std(dim=0).min() > 1e-3  # a hundred times that: what was read makes a difference
    if kind in ("pretrained", "safetensors", "state_dict"):
        expected, found = case.model.state_dict(), forward.state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert not any(module.training for module in forward.modules())
    facts = export_facts.read(exported(name, kind))
    assert (facts.kind, facts.dtype, facts.file) == (kind, "fp32", FILES[kind])
    assert (exported(name, kind) / facts.file).is_file()
    assert facts.agreement.samples == 6
    assert facts.spec == case.spec


STRANGER = """
import sys
import numpy as np, onnxruntime, torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

root = sys.argv[1]
sys.path.insert(0, root + "/user-safetensors-fp32")  # their own file, which lies beside the weights
import my_model

inputs = dict(np.load(sys.argv[2]))
image = inputs["image"]
tensors = {name: torch.from_numpy(column) for name, column in inputs.items()}
tokens = {name: tensors[name] for name in ("input_ids", "attention_mask")}
found = {}
mine = my_model.Mine(16, 3)
mine.load_state_dict(load_file(root + "/user-safetensors-fp32/model.safetensors"))
again = my_model.Mine(16, 3)
again.load_state_dict(torch.load(root + "/user-state_dict-fp32/model.pt", weights_only=True))
bert = AutoModelForSequenceClassification.from_pretrained(root + "/transformer-pretrained-fp32")
same = BertForSequenceClassification(BertConfig.from_pretrained(root + "/transformer-state_dict-fp32"))
same.load_state_dict(torch.load(root + "/transformer-state_dict-fp32/model.pt", weights_only=True))
with torch.no_grad():
    found["user-safetensors"], found["user-state_dict"] = mine.eval()(tensors), again.eval()(tensors)
    found["transformer-pretrained"], found["transformer-state_dict"] = bert(**tokens).logits, same.eval()(**tokens).logits
    for name, given in (("cnn", [tensors["image"]]), ("user", [tensors["image"]]), ("transformer", [*tokens.values()])):
        program = torch.export.load(f"{root}/{name}-torch_export-fp32/model.pt2").module()
        found[name + "-torch_export"] = program(*given)
        session = onnxruntime.InferenceSession(f"{root}/{name}-onnx-fp32/model.onnx")
        feed = {each.name: inputs[each.name] for each in session.get_inputs()}
        found[name + "-onnx"] = session.run(["logits"], feed)[0]
np.savez(sys.argv[3], **found)
tokenizer = AutoTokenizer.from_pretrained(root + "/transformer-pretrained-fp32")
print(tokenizer("the striker scored").input_ids, [bert.config.id2label[i] for i in range(4)], bert.config.label2id["Sports"])
assert not [name for name in sys.modules if name.startswith("lockstep")]
"""


def test_a_stranger_needs_none_of_our_code(cases, exported, tmp_path):
    """In another process, with torch, transformers, safetensors and onnxruntime alone."""
    for kind in KINDS:
        for name in CASES:
            root = exported(name, kind).parent
    texts, images = cases["transformer"].batch(3, seed=7, length=13), cases["cnn"].batch(3, seed=7)
    batch = {**texts, **images}
    np.savez(tmp_path / "in.npz", **{name: column.numpy() for name, column in batch.items()})
    argv = [sys.executable, "-c", STRANGER, root, tmp_path / "in.npz", tmp_path / "out.npz"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "out.npz")
    assert len(found) == 10
    for which in found:
        expected = cases[which.partition("-")[0]].logits(batch).numpy()
        assert np.allclose(found[which], expected, rtol=0, atol=TOLERANCE), which
    tokenizer = tokenizer_of(
        exported("transformer", "pretrained"), export_facts.read(exported("transformer", "pretrained"))
    )
    assert done.stdout == f"{tokenizer(['the striker scored'])[0].tolist()} {list(exporting.TEXTS.labels)} 1\n"


REDUCED = [
    ("cnn", "pretrained", "fp16"),
    ("user", "safetensors", "bf16"),
    ("transformer", "state_dict", "fp16"),
    ("transformer", "torch_export", "bf16"),
    ("cnn", "onnx", "fp16"),
    ("user", "onnx", "int8"),
]
MORE_REDUCED = [
    *((name, "pretrained", dtype) for name in CASES for dtype in ("fp16", "bf16") if (name, dtype) != ("cnn", "fp16")),
    ("transformer", "safetensors", "fp16"),
    ("user", "state_dict", "bf16"),
    ("cnn", "torch_export", "fp16"),
    ("user", "torch_export", "bf16"),
    ("cnn", "onnx", "int8"),
    ("transformer", "onnx", "int8"),
]


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [*REDUCED, *(pytest.param(*each, marks=pytest.mark.matrix) for each in MORE_REDUCED)],
    ids=lambda each: each,
)
def test_what_reduced_weights_cost_is_told_rightly(cases, exported, name, kind, dtype):
    case, folder = cases[name], exported(name, kind, dtype)
    forward, found = forward_of(folder), export_facts.read(folder).agreement
    rows = []
    for batch in case.all():
        with torch.no_grad():
            pair = case.logits(batch).numpy(), forward(batch).float().numpy()
        rows.append((*pair, batch["label"].numpy()))
    before, after, label = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    assert found.samples == len(label) == 56
    assert found.largest_difference == pytest.approx(np.abs(before - after).max(), rel=1e-5)
    assert found.largest_output == pytest.approx(np.abs(before).max(), rel=1e-5)
    assert found.labels_changed == (before.argmax(1) != after.argmax(1)).sum()
    assert found.accuracy_before == (before.argmax(1) == label).mean()
    assert found.accuracy_after == (after.argmax(1) == label).mean()
    assert 0 < found.largest_difference < 0.25 * found.largest_output
    assert f"{found.accuracy_after:.4f}" in (folder / "README.md").read_text()
    sizes = [(exported(name, kind, each) / FILES[kind]).stat().st_size for each in ("fp32", dtype)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(("kind", "file"), [("pretrained", "model.safetensors"), ("state_dict", "model.pt")])
def test_numbers_that_count_stay_whole_in_fewer_bits(exported, kind, file):
    """BatchNorm's count of batches is no weight; its running statistics are."""
    dtype = {"pretrained": "fp16", "state_dict": "bf16"}[kind]
    path = exported("user", kind, dtype) / file
    state = load_file(path) if kind == "pretrained" else torch.load(path, weights_only=True)
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    assert state["norm.num_batches_tracked"] == 3
    floating = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    assert floating == {{"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_transformers_reads_the_dtype_that_was_written(exported, dtype):
    folder = exported("transformer", "pretrained", dtype)
    assert f'"dtype": "{dict(fp16="float16", bf16="bfloat16")[dtype]}"' in (folder / "config.json").read_text()
    dtypes = {parameter.dtype for parameter in forward_of(folder).parameters()}
    assert dtypes == {dict(fp16=torch.float16, bf16=torch.bfloat16)[dtype]}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "int8") for kind in KINDS if kind != "onnx"), ("onnx", "bf16")])
def test_a_dtype_that_a_format_cannot_hold(cases, tmp_path, kind, dtype):
    can = "fp32, fp16, int8" if kind == "onnx" else "fp32, fp16, bf16"
    with pytest.raises(ConfigError, match=f"^export.kind={kind} cannot hold {dtype}; it can hold {can}$"):
        cases["cnn"].export(tmp_path / "e", kind, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_model_written_for_one_dtype(tmp_path):
    """As README's own example is: a byte divided by 255 is fp32."""
    case = exporting.user_case(tmp_path, exporting.MY_MODEL.replace(".to(self.head.weight.dtype)", ""))
    for kind in ("pretrained", "onnx"):
        with pytest.raises(ModelError, match=r"x\.to\(self\.layer\.weight\.dtype\)") as caught:
            case.export(tmp_path / "e", kind, dtype="fp16")
        assert str(caught.value).count("\n") == 2
    assert case.export(tmp_path / "e").agreement.largest_difference < TOLERANCE


@pytest.mark.parametrize("kind", ["onnx", "torch_export"])
def test_a_model_that_looks_at_its_numbers(tmp_path, capfd, kind):
    """Cannot be traced: one message with the place, and nothing of what the tracer prints."""
    code = exporting.MY_MODEL.replace(
        "        return self.head",
        "        if batch['image'].sum() > 1e6:\n            return self.head(0 * self.body(batch['image'] / 255))\n        return self.head",
    )
    case = exporting.user_case(tmp_path, code)
    with pytest.raises(ModelError, match=rf"cannot be written as {kind}: .*my_model.py:13: .*data-dependent") as caught:
        case.export(tmp_path / "e", kind)
    assert str(caught.value).count("\n") == 2
    assert "export.kind=pretrained" in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert case.export(tmp_path / "e").agreement.largest_difference == 0


def test_a_graph_that_is_right_for_the_traced_batch_alone(tmp_path):
    """A branch on the size of the batch is gone from an ONNX graph, which nothing but another size can show."""
    code = exporting.MY_MODEL.replace(
        "return self.head(", "factor = 2 if len(batch['image']) > 1 else 1\n        return factor * self.head("
    )
    with pytest.raises(ModelError, match="read back and differs .*; nothing was kept"):
        exporting.user_case(tmp_path, code).export(tmp_path / "e", "onnx")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_packages_that_are_missing(cases, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'lockstep-train\[onnx\]' \(.*{package}"):
        cases["cnn"].export(tmp_path / "e", "onnx", dtype="int8")
    assert not (tmp_path / "e").exists()


def test_weights_beyond_what_one_onnx_file_holds(cases, tmp_path, monkeypatch):
    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1)  # 2 GB
    case, batch = cases["cnn"], cases["cnn"].batch(4, seed=9)
    case.export(tmp_path / "large", "onnx")
    case.export(tmp_path / "small", "onnx", dtype="int8")
    assert {path.name for path in (tmp_path / "large").iterdir()} >= {"model.onnx", "model.onnx.data"}
    (tmp_path / "large").rename(tmp_path / "moved")
    assert torch.allclose(forward_of(tmp_path / "moved")(batch), case.logits(batch), atol=TOLERANCE)
    assert [path.name for path in (tmp_path / "small").glob("*.onnx*")] == ["model.onnx"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights_are_told(exported, tmp_path, kind):
    shutil.copytree(exported("user", kind), tmp_path / "e")
    file = tmp_path / "e" / FILES[kind]
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"<html>not found</html>", None):
        file.unlink() if content is None else file.write_bytes(content)
        trust.remember([trust.Code.of(file, content or b"")])  # else a program that was changed is somebody else's
        with pytest.raises(ModelError, match=r"the export .* cannot be read \(.*export the run again$"):
            forward_of(tmp_path / "e")


def test_what_the_users_code_wants_and_does_not_find(tmp_path, monkeypatch):
    """A module beside the user's file travels along; one that is gone is named."""
    (tmp_path / "layers_of_mine.py").write_text("from torch.nn import Linear\n")
    code = exporting.MY_MODEL.replace("from torch import nn", "from torch import nn\nimport layers_of_mine")
    exporting.user_case(tmp_path, code).export(tmp_path / "e")
    (tmp_path / "layers_of_mine.py").unlink()
    monkeypatch.delitem(sys.modules, "layers_of_mine")
    monkeypatch.delitem(sys.modules, "lockstep_user_my_model")
    forward_of(tmp_path / "e")
    (tmp_path / "e" / "layers_of_mine.py").unlink()
    monkeypatch.delitem(sys.modules, "layers_of_mine", raising=False)
    monkeypatch.delitem(sys.modules, "lockstep_user_my_model", raising=False)
    with pytest.raises(ModelError, match="ModuleNotFoundError: No module named 'layers_of_mine'"):
        forward_of(tmp_path / "e")
