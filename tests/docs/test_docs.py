"""What the pages say works: their code is run as a reader would run it."""

import json
import re

import pytest
import warm
from pages import PAGES, ROOT, blocks

from lockstep.recipe.recipe import Recipe, settings


def lockstep(folder, *arguments):
    done = warm.run(["lockstep", *arguments], cwd=folder, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next((folder / "runs").glob("*/summary.json")).read_text())


def test_readmes_own_model(tmp_path):
    (tmp_path / "my_model.py").write_text(blocks(ROOT / "README.md", "python")[0])
    arguments = ["model.kind=user", "model.file=my_model.py", "model.options.width=64", "train.epochs=8"]
    found = lockstep(tmp_path, "train", str(ROOT / "examples" / "digits.yaml"), *arguments)
    assert found["evaluation"]["accuracy"] > 0.9


def test_spirals(tmp_path):
    page = ROOT / "docs" / "your-own.md"
    (tmp_path / "spirals.py").write_text(blocks(page, "python")[0])
    (tmp_path / "spirals.yaml").write_text(blocks(page, "yaml")[0])
    found = lockstep(tmp_path, "train", "spirals.yaml")
    assert found["evaluation"]["accuracy"] > 0.95
    assert 0 <= found["evaluation"]["calibration_error"] < 0.2
    assert (tmp_path / "diary.txt").read_text().count("step ") == 40


def test_a_plain_scripts_model_and_dataset(tmp_path):
    page = ROOT / "docs" / "coming-from.md"
    (tmp_path / "user.py").write_text(blocks(page, "python")[0])
    (tmp_path / "user.yaml").write_text(blocks(page, "yaml")[0])
    (tmp_path / "mymodel.py").write_text(MY_MODEL)
    found = lockstep(tmp_path, "train", "user.yaml", "train.epochs=2", "optim.lr=0.1")
    assert found["evaluation"]["accuracy"] > 0.9


MY_MODEL = """
import torch

Net = lambda: torch.nn.Linear(4, 2)


class MyData(torch.utils.data.Dataset):
    def __init__(self, train):
        self.x = torch.randn(2000 if train else 200, 4, generator=torch.Generator().manual_seed(int(train)))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.x[i].sum() > 0)
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


OF_MODULES = {f"model.{name}" for name in ("eval", "half", "module", "no_sync", "state_dict")}
"""Of PyTorch's, which pages name in code: no settings of a model."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_are_named_exist(page):
    sections, files = "|".join(Recipe.model_fields), "py|yaml|json|html|csv|sh|md|svg|onnx|safetensors|log|txt|pt|tmp"
    named = set(re.findall(rf"`(?:lockstep [^`]* )?((?:{sections})\.(?!(?:{files})\b)[a-z_]+)\b", page.read_text()))
    assert named - set(settings()) - OF_MODULES == set()


def test_readmes_config_is_one(tmp_path):
    (tmp_path / "c.yaml").write_text(blocks(ROOT / "README.md", "yaml")[0])
    done = warm.run(["lockstep", "train", "c.yaml", "--dry-run", "--verbose"], cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "epochs: 20" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "pin_memory",
        "OOM",
        "mp.spawn",
        "torchrun two nodes",
        "drop_last",
        "NCCL diagram",
        "GPU group",
        "class imbalance",
    ],
)
def test_what_learners_search_for_is_an_entry_of_the_glossary(words):
    """The search of the site looks for all words on a page and its sections."""
    entries = re.split(r"^#+ ", (ROOT / "docs" / "glossary.md").read_text().lower(), flags=re.MULTILINE)
    assert [entry for entry in entries if all(word in entry for word in words.lower().split())]


def test_promises_name_tests_that_exist():
    promises = [line for line in (ROOT / ".github" / "SECURITY.md").read_text().splitlines() if "::" in line]
    assert len(promises) > 15
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for file, name in re.findall(r"`(\w+\.py)::(\w+)`", "\n".join(promises)):
        assert f"def {name}(" in files[file], f"{file}::{name}"
