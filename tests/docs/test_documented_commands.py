"""The commands that README and docs show, as they are written there: understood, and run in a folder with what they name.

Left to their own tests are commands that take minutes or need a run that is under way (ELSEWHERE); what needs a cluster
is planned only (--dry-run).
"""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess

import pytest
import typer
import warm
import yaml
from data_files import write_mnist
from exporting import text_case
from pages import PAGES, ROOT, blocks
from PIL import Image

from lockstep.cli import _app, _common
from lockstep.recipe.recipe import Recipe, load, settings

ELSEWHERE = {
    "bisect",
    "cancel",
    "doctor",
    "estimate",
    "fork",
    "gate",
    "prove",
    "replay",
    "scale",
    "sweep",
    "tune",
    "verify",
}
SHORTENED = {
    "profile": ["--steps", "2", "--traced", "1"],
    "serve": ["--port", "0"],
    "train": ["train.epochs=null", "train.steps=3"],
}
CLUSTER = re.compile(r"launch\.kind=(slurm|ray|kubernetes)|--rendezvous")
CONFIG = (
    "data: {kind: digits}\nmodel: {kind: cnn}\ntrain: {global_batch: 64, micro_batch: 16}\nlaunch: {processes: 2}\n"
)
NEWS = "body,topic\n" + "".join(
    f"a text about {topic} {i},{topic}\n" for i in range(20) for topic in ("sport", "money")
)


def commands(page):
    """Word lists of `lockstep ...` in the page's blocks of shell commands; not those that show a grammar."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(re.sub(r"^node\d\$ ", "", line), comments=True)
            parts = [list(part) for is_and, part in itertools.groupby(words, "&&".__eq__) if not is_and]
            yield from (part for part in parts if part[0] == "lockstep" and not any(w.startswith("[") for w in part))


SHOWN = {page: found for page in PAGES if (found := list(commands(page)))}
OF_PAGE = pytest.mark.parametrize("page", SHOWN, ids=lambda page: str(page.relative_to(ROOT)))


@OF_PAGE
def test_commands_are_understood(page, monkeypatch):
    monkeypatch.setattr(_common, "_check_recorded", lambda _: None)  # they name runs that are not here
    group = typer.main.get_command(_app.app)
    for _, *words in SHOWN[page]:
        context = typer.Context(group, info_name="lockstep")
        if words == ["--version"]:
            continue
        name, command, rest = group.resolve_command(context, words)
        command.make_context(name, rest, parent=context)  # raises for an unknown option
        keys = {word.partition("=")[0] for word in rest if re.match(r"[a-z]+\.[a-z_.]+=", word)}
        assert {".".join(key.split(".")[:2]) for key in keys} <= set(settings())


def configs(page):
    """Blocks of YAML whose keys are sections of a config."""
    for block in blocks(page, "yaml"):
        found = yaml.safe_load(block)
        if isinstance(found, dict) and found.keys() <= set(Recipe.model_fields):
            yield block


@pytest.mark.parametrize("page", [page for page in PAGES if list(configs(page))], ids=lambda page: page.name)
def test_configs_are_valid(page, tmp_path):
    for block in configs(page):
        (tmp_path / "c.yaml").write_text(block)
        assert load(tmp_path / "c.yaml")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, minilm):
    """A folder with the files and runs that pages name, of images; and one of texts."""
    images, texts = (tmp_path_factory.mktemp(name) for name in ("images", "texts"))
    (images / "examples").symlink_to(ROOT / "examples")
    for name in ("FOLDER", "data"):
        write_mnist(images / name / "mnist", counts=(("train", 10), ("t10k", 10)))
    (images / "photos").mkdir()
    for i in range(3):
        Image.new("L", (8, 8), 80 * i).save(images / "photos" / f"{i}.png")
    for name in ("c.yaml", "my.yaml", "big.yaml", "CONFIG"):
        (images / name).write_text(CONFIG)
    for language, suffix in (("python", "py"), ("yaml", "yaml")):
        (images / f"spirals.{suffix}").write_text(blocks(ROOT / "docs" / "your-own.md", language)[0])
    (images / "my_model.py").write_text(blocks(ROOT / "README.md", "python")[0])
    own_loss = next(each for each in blocks(ROOT / "docs" / "fine-tuning.md", "python") if each.startswith("# mine.py"))
    (images / "mine.py").write_text(own_loss)
    lockstep(images, "train", "c.yaml", "run.name=NAME", "train.steps=123")
    lockstep(images, "export", "runs/NAME")
    for name in ("A", "B", "one"):
        shutil.copytree(images / "runs" / "NAME", images / "runs" / name)
    lockstep(images, "train", "examples/gpt.yaml", "run.name=gpt", "train.epochs=null", "train.steps=2")
    (images / "prompts.csv").write_text("prompt\nThe\n")
    for name in ("new.csv", "reviews.csv", "train.csv"):
        (texts / name).write_text(NEWS)
    text_case(texts / "tiny", minilm)
    files = "data: {kind: files, train: train.csv, test: new.csv, text_column: body, label_column: topic}\n"
    (texts / "c.yaml").write_text(
        f"{files}model: {{kind: transformer, name: {texts}/tiny, max_length: 32}}\ntrain: {{steps: 2}}\n"
    )
    lockstep(texts, "train", "c.yaml", "run.name=NAME")
    lockstep(texts, "export", "runs/NAME")
    return images, texts


def lockstep(folder, *words):
    done = warm.run(["lockstep", *words], cwd=folder, env=os.environ | {"WANDB_MODE": "offline"}, timeout=120)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"


@OF_PAGE
def test_commands_run(page, prepared, tmp_path):
    """In the page's order, in a folder of its own."""
    folders = [shutil.copytree(each, tmp_path / each.name, symlinks=True) for each in prepared]
    for name in re.findall(r"run\.name=(\w+)", str(SHOWN[page])):
        shutil.rmtree(folders[0] / "runs" / name, ignore_errors=True)  # the page itself trains it
    for _, name, *words in SHOWN[page]:
        needs_cluster = CLUSTER.search(" ".join(words))
        if name in ELSEWHERE or (needs_cluster and name != "train") or "examples/ag_news.yaml" in words:
            continue
        folder = folders["new.csv" in words or "reviews.csv" in words]
        words = [word for word in words if not word.startswith("train.epochs=") and (name, word) != ("logs", "-f")]
        if needs_cluster and "--dry-run" not in words:
            words.append("--dry-run")
        if "runs/NAME/recipe.yaml" not in words:  # resumes the run as it is
            words += SHORTENED.get(name, [])
        if name == "serve":
            serve(folder, words)
        else:
            lockstep(folder, name, *words)


def serve(folder, words):
    with warm.Popen(["lockstep", "serve", *words], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert "http://127.0.0.1:" in next(line for line in server.stdout if "http" in line)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    assert server.returncode == 0
