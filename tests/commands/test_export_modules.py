"""Exports of models whose file imports others: they take these along, or nothing is exported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from members import further
from PIL import Image
from running import lockstep

from lockstep.base import plugins, trust

FILES = {
    "net.py": """
from torch import nn

import scale
from parts import layers
from parts.deep.norm import Centred


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(Centred(), nn.Flatten(), layers.Wide(64, classes))

    def forward(self, batch):
        from late import halved

        return halved(self.body(batch["image"] * scale.SCALE))


def build(options, spec):
    return Net(len(spec.labels))
""",
    "scale.py": "SCALE = 1 / 16\n",
    "late.py": "def halved(x):\n    return x / 2\n",
    "parts/__init__.py": "from . import layers\n",
    "parts/layers.py": """
from torch import nn

from .deep import norm


class Wide(nn.Linear):
    def forward(self, x):
        return super().forward(x) * norm.FACTOR
""",
    "parts/deep/norm.py": """
from torch import nn

from ..sizes import ONE

FACTOR = 2.0 * ONE


class Centred(nn.Module):
    def forward(self, x):
        return x.float() - x.float().mean((1, 2, 3), keepdim=True)
""",
    "parts/sizes.py": "ONE = 1\n",
    "unused.py": "raise SystemExit('nobody imports it')\n",
}
SETTINGS = ["run.name=a", "train.steps=4", "launch.processes=1", "data.limit=200", "checkpoint.every_minutes=100"]


def trained(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: user, file: net.py}\n")
    done = lockstep(folder, "train", "c.yaml", *SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "a"


def predicted(folder, model):
    done = lockstep(folder, "predict", str(model), "pictures", "--out", f"{model.name}.jsonl", "--trust-code")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / f"{model.name}.jsonl").read_text().splitlines()]


def test_modules_beside_the_file_go_along(tmp_path):
    """The export is used where the originals are gone, in a folder with other modules of their names."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    run = trained(own, FILES)
    (elsewhere / "pictures").mkdir(parents=True)
    (elsewhere / "scale.py").write_text("SCALE = -100\n")
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 17, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(elsewhere / "pictures" / f"{seed}.png")
    before = predicted(elsewhere, run)
    for kind in ("pretrained", "onnx"):
        done = lockstep(own, "export", "runs/a", f"export.kind={kind}", "--to", str(elsewhere / kind))
        assert done.returncode == 0, done.stderr
        code = {path.relative_to(elsewhere / kind).as_posix() for path in (elsewhere / kind).rglob("*.py")}
        assert code - {"loader.py"} == FILES.keys() - {"unused.py"}
        facts = json.loads((elsewhere / kind / "lockstep.json").read_text())
        assert code <= {*facts["files"]}
    shutil.rmtree(own)
    for kind in ("pretrained", "onnx"):
        after = predicted(elsewhere, elsewhere / kind)
        assert [row["label"] for row in after] == [row["label"] for row in before]
        assert np.allclose([row["confidence"] for row in after], [row["confidence"] for row in before], atol=1e-5)


SMALL = """
from torch import nn


class Net(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["image"].flatten(1) / 16)


def build(options, spec):
    return Net(64, len(spec.labels))
"""


@pytest.mark.parametrize(
    ("beside", "first", "reason"),
    [
        ("scale.py", "import importlib\nimportlib.import_module('scale')", "'scale'"),
        *further(
            ("words.txt", "import pathlib\n(pathlib.Path(__file__).parent / 'words.txt').read_text()", "words.txt"),
            ("lib/far.py", "import sys\nsys.path.append('lib')\nimport far", "'far'"),
        ),
    ],
)
def test_what_cannot_go_along_is_refused(tmp_path, beside, first, reason):
    run = trained(tmp_path, {beside: "", "net.py": first + SMALL})
    done = lockstep(tmp_path, "export", str(run))
    assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "absolute path" in done.stderr and not (run / "export").exists()


def test_each_file_gets_the_modules_of_its_own_folder(tmp_path):
    """Two of one name, and one that was replaced, as under a server."""
    files = {name: tmp_path / name / "net.py" for name in ("a", "b")}

    def written(name, text):
        package = tmp_path / name / "scales"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "one.py").write_text(text)
        files[name].write_text("import sys\nfrom scales import one\nlate = lambda: sys.modules['scales.one'].SCALE")
        trust.own(trust.code_with_imports(files[name]))

    def loaded(name):
        return plugins.load_file(files[name], "model.file").one.SCALE

    written("a", "SCALE = 1")
    written("b", "SCALE = 2")
    assert [loaded("a"), loaded("b"), loaded("a")] == [1, 2, 1]
    code = {Path(code.name).relative_to(tmp_path).as_posix() for code in trust.code_with_imports(files["b"])}
    assert code == {"b/net.py", "b/scales/__init__.py", "b/scales/one.py"}  # though "scales" is imported
    written("a", "SCALE = 3 ")
    files["a"].write_text(files["a"].read_text() + "\n")  # another file, so it is read again
    trust.own(trust.code_with_imports(files["a"]))
    assert loaded("a") == 3
