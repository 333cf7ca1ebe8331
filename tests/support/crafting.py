"""What somebody else may have put into the files of a checkpoint, a run or an export: bytes that would run code."""

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path

from fuzzing import CANARY


class Shell:
    """Unpickled, it runs a command of the shell, which leaves the canary in the working folder."""

    def __reduce__(self):
        return os.system, (f"touch {CANARY}",)


def pickled(protocol=2):
    return pickle.dumps(Shell(), protocol)


def archived(file, **parts):
    """An archive as torch.save writes it whose pickle runs code; `parts` are more entries, or others."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": pickled(), "version": b"3\n", "byteorder": b"little", **parts}.items():
            archive.writestr(f"archive/{name}", content)


def sealed(checkpoint, **changes):
    """Give a checkpoint's manifest other fields, and whatever lies beside it its true sizes and sums: a manifest that
    is valid, by somebody who knows how it is made."""
    file = Path(checkpoint, "manifest.json")
    body = json.loads(file.read_bytes())
    del body["sha256"]
    others = sorted(path for path in Path(checkpoint).iterdir() if path.name != "manifest.json")
    body["files"] = {path.name: (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) for path in others}
    body |= changes
    own = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    file.write_text(json.dumps({**body, "sha256": own}, indent=1), encoding="utf-8")


def endless_graph(path, *, grows):
    """An ONNX graph for images of 8 x 8 and ten labels whose loop goes on for ever, and may keep what it computes."""
    from onnx import TensorProto, helper, save

    def told(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    def integer(name, value):
        return helper.make_tensor(name, TensorProto.INT64, [1], [value])

    number, flag = TensorProto.FLOAT, TensorProto.BOOL
    steps = [helper.make_node("Identity", ["more"], ["again"]), helper.make_node("Identity", ["x"], ["y"])]
    outputs = [told("again", flag, []), told("y", number, None)]
    if grows:
        shape = helper.make_tensor("shape", TensorProto.INT64, [1], [1 << 20])
        steps += [
            helper.make_node("Constant", [], ["size"], value=shape),
            helper.make_node("ConstantOfShape", ["size"], ["kept"]),
        ]
        outputs.append(told("kept", number, None))
    body = helper.make_graph(
        steps, "body", [told("i", TensorProto.INT64, []), told("more", flag, []), told("x", number, None)], outputs
    )
    nodes = [
        helper.make_node("Constant", [], ["true"], value=helper.make_tensor("t", flag, [], [True])),
        helper.make_node("Cast", ["image"], ["pixels"], to=number),
        helper.make_node("Loop", ["", "true", "pixels"], ["last", "all"][: 1 + grows], body=body),
        helper.make_node("Flatten", ["last"], ["flat"]),
        helper.make_node("Slice", ["flat", "from", "to", "axis"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "endless",
        [told("image", TensorProto.UINT8, ["m", 1, 8, 8])],
        [told("logits", number, ["m", 10]), *([told("all", number, None)] if grows else [])],
        [integer("from", 0), integer("to", 10), integer("axis", 1)],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
