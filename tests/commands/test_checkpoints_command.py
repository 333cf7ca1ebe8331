"""`lockstep checkpoints` as people use it: what is listed and why it is kept, damage that is reported, a run that goes on."""

import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import torch
from places import EXAMPLES
from rich.console import Console
from rich.filesize import decimal
from typer.testing import CliRunner
from written_checkpoints import save

from lockstep.base import config
from lockstep.base.errors import CheckpointError
from lockstep.checkpoint import inventory, layout, retention, verify
from lockstep.checkpoint import inventory as table
from lockstep.checkpoint.layout import CheckpointSection, Manifest, folder_of
from lockstep.cli import _app
from lockstep.recipe import run_paths
from lockstep.recipe.recipe import starter

SECTION = "{keep: 1, best: accuracy, keep_every_hours: 6}"
STEPS = (10, 20, 30, 40)
HOURS = (5.5 * 24, 30.5, 23.5, 2.5)
"""How old the checkpoints are: half a unit away from any other number."""
METRICS = ({"loss": 0.4, "accuracy": 0.7}, {"loss": 0.25, "accuracy": 0.91549}, {}, {"loss": 0.3, "accuracy": 0.9})
EXAMPLE = EXAMPLES / "digits.yaml"
LOCKSTEP = pathlib.Path(sys.executable).with_name("lockstep")


def save_all(root, steps, hours, metrics):
    now = time.time()
    for step, age, values in zip(steps, hours, metrics, strict=True):
        generator = torch.Generator().manual_seed(step)
        tensors = {
            "model.weight": torch.randn(8, step, generator=generator),
            "optimizer.weight.exp_avg": torch.randn(8, step, generator=generator),
        }
        facts = {"numeric": {"run.seed": 0}, "progress": {"step": step}, "metrics": values}
        save(root, tensors, Manifest(step=step, epoch=step // 10, world_size=2, saved_at=now - 3600 * age, **facts))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Real checkpoints of two processes after four steps: to be copied, not touched."""
    root = tmp_path_factory.mktemp("saved")
    ranks(2, save_all, root, STEPS, HOURS, METRICS)
    return root


def recipe_of(folder, section=SECTION):
    folder.mkdir(parents=True, exist_ok=True)
    recipe = config.parse(type(starter("digits")), f"run: {{name: old}}\ncheckpoint: {section}", file="made here")
    (folder / "recipe.yaml").write_text(config.dump(recipe), encoding="utf-8")
    return folder


@pytest.fixture
def root(saved, tmp_path):
    """The checkpoints of a run, to be done with as you like."""
    return shutil.copytree(saved, recipe_of(tmp_path / "runs" / "a") / "checkpoints")


@pytest.fixture
def listing(tmp_path, monkeypatch):
    """Runs the command where `runs` lies -> (exit code, lines with single spaces, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = CliRunner().invoke(_app.app, ["checkpoints", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, plain(result.stdout), result.stderr

    return run


def plain(text):
    """Lines without colours, rules and the spaces that align."""
    lines = [" ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split()) for line in text.splitlines()]
    return [line for line in lines if line.strip("─ ")]


def size(folder):
    """As listed: of all files but the manifest."""
    return decimal(sum(file.stat().st_size for file in folder.iterdir() if file.name != layout.MANIFEST))


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


HEADER = "step epoch size age processes metrics kept for state"


def rows(root, state="sizes right"):
    """What is listed of the untouched run."""
    sizes = [size(folder_of(root, step)) for step in STEPS]
    return [
        f"40 4 {sizes[3]} 2 h 2 accuracy 0.9000 newest, every 6 h {state}",
        f"30 3 {sizes[2]} 23 h 2 every 6 h {state}",
        f"20 2 {sizes[1]} 30 h 2 accuracy 0.9155 best, every 6 h {state}",
        f"10 1 {sizes[0]} 5 d 2 accuracy 0.7000 every 6 h {state}",
    ]


RESUMES = "a resume takes step-000000040"
DOUBT = ", if its bytes are right, too"


# ---- what is listed


def test_newest_first_with_what_each_is_kept_for(listing, root):
    folders = [root.parent, "runs/a", "runs/a/checkpoints", "runs/../runs/a/"]
    for folder in folders:
        code, lines, err = listing(folder)
        assert lines == [HEADER, *rows(root), f"{RESUMES}{DOUBT} (--verify reads them)"]
        assert (code, err) == (0, "")
        assert listing(folder, "--verify") == (0, [HEADER, *rows(root, "verified"), RESUMES], "")


@pytest.mark.parametrize(
    ("section", "metrics", "kept"),
    [
        ("{keep: 2}", "loss 0.3000, accuracy 0.9000", ["newest", "newest", "nothing", "nothing"]),
        ("{keep: 9}", "loss 0.3000, accuracy 0.9000", ["newest"] * 4),
        ("{keep: 1, best: loss}", "loss 0.3000", ["newest", "nothing", "best", "nothing"]),
        ("{keep: 1, best: f1}", "", ["newest", "nothing", "nothing", "nothing"]),
        (
            "{keep: 1, keep_every_hours: 30.5}",
            "loss 0.3000, accuracy 0.9000",
            ["newest", "nothing", "every 30.5 h", "every 30.5 h"],
        ),
    ],
)
def test_the_recipe_decides_what_is_kept_and_shown(listing, root, section, metrics, kept):
    recipe_of(root.parent, section)
    code, lines, _ = listing("runs/a")
    assert code == 0
    assert lines[1] == " ".join(f"40 4 {size(folder_of(root, 40))} 2 h 2 {metrics} {kept[0]} sizes right".split())
    assert [next(k for k in {*kept} if line.endswith(f" {k} sizes right")) for line in lines[1:5]] == kept
    told = ["what is kept for nothing is deleted after the next save"]
    assert lines[6:] == (told if "nothing" in kept else [])


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("best", [None, "loss"])
@pytest.mark.parametrize("hours", [None, 6.0])
@pytest.mark.parametrize("damaged", [(), (40, 30), STEPS])
def test_it_says_what_the_keeper_does(root, keep, best, hours, damaged):
    """Whatever is said to be kept for something outlives the keeper, and nothing else does."""
    for step in damaged:
        flip(folder_of(root, step) / "__0_0.distcp")
    section = CheckpointSection(keep=keep, best=best, keep_every_hours=hours)
    found = inventory.take_inventory(root, section, every_byte=True)
    assert (found.resumed, found.is_certain) == (verify.newest(root, lambda *_: None), True)
    retention.tidy(root, section)
    assert layout.listed(root) == [entry.folder for entry in found.entries if entry.kept_for != ["nothing"]]


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        *[(-500, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h")],
        *[(47.9 * 3600, "47 h"), (48 * 3600, "2 d"), (5.9 * 86400, "5 d"), (1e9, "11574 d")],
    ],
)
def test_age(seconds, age):
    assert table._age(seconds) == age


def test_one_checkpoint_alone(listing, root):
    for named in ("runs/a/checkpoints/step-000000020", root / "step-000000020"):
        code, lines, _ = listing(named)
        assert (code, lines) == (0, [HEADER, rows(root)[2], f"{RESUMES}{DOUBT} (--verify reads them)"])
    flip(root / "step-000000030" / "__0_0.distcp")
    (root / "step-000000010" / "__0_0.distcp").unlink()
    (root / "step-000000050.tmp-0a1b2c3d").mkdir()
    code, lines, _ = listing("runs/a/checkpoints/step-000000020", "--verify")
    assert (code, lines) == (0, [HEADER, rows(root, "verified")[2], RESUMES + DOUBT])
    assert listing("runs/a/checkpoints/step-000000040", "--verify")[1][-1] == RESUMES
    code, lines, _ = listing("runs/a/checkpoints/step-000000030", "--verify")
    assert code == 1
    assert lines[1] == rows(root, "damaged: __0_0.distcp has been changed (its sha256 differs)")[1]
    flip(root / "step-000000040" / "__0_0.distcp")  # nobody asked for this one, so it is not read
    assert listing("runs/a/checkpoints/step-000000020", "--verify")[1][-1] == RESUMES + DOUBT


def test_checkpoints_on_another_disk_are_found_through_the_link(listing, root, tmp_path):
    root.rename(tmp_path / "disk")
    root.symlink_to(tmp_path / "disk")
    for path in ("runs/a", "runs/a/checkpoints"):
        assert listing(path)[1][1:5] == rows(root)
    assert listing("runs/a/checkpoints/step-000000040")[1][1] == rows(root)[0]


# ---- damage


def test_a_flipped_byte_is_seen_by_verify_alone(listing, root):
    file = root / "step-000000040" / "__1_0.distcp"
    flip(file)
    code, lines, _ = listing("runs/a")
    assert (code, lines[1:5]) == (0, rows(root))
    code, lines, err = listing("runs/a", "--verify")
    state = "damaged: __1_0.distcp has been changed (its sha256 differs)"
    first = rows(root, state)[0].replace("newest, ", "")
    kept = rows(root, "verified")[1].replace("every 6 h", "newest, every 6 h")
    assert lines == [HEADER, first, kept, *rows(root, "verified")[2:], "a resume takes step-000000030"]
    assert (code, err) == (1, "")


def test_a_run_whose_checkpoints_are_all_damaged_says_how_to_see_why(root):
    """To who evaluates or exports it: further training would end at once."""
    for folder in layout.listed(root):
        os.truncate(folder / "__0_0.distcp", 100)
    how = f"none of the 4 checkpoints in {root} is whole; see why with: lockstep checkpoints {root.parent} --verify"
    with pytest.raises(CheckpointError, match=re.escape(how)):
        run_paths.run_of(root.parent)


def test_a_truncated_file_is_seen_by_both(listing, root):
    file = root / "step-000000020" / "__0_0.distcp"
    length = file.stat().st_size
    row = rows(root, f"damaged: __0_0.distcp has 100 bytes instead of {length}")[2]  # of the size that it should have
    os.truncate(file, 100)
    for options, state in (([], "sizes right"), (["--verify"], "verified")):
        code, lines, _ = listing("runs/a", *options)
        assert (code, lines[3]) == (1, row)
        assert lines[4] == rows(root, state)[3]


def test_a_manifest_that_cannot_be_read_leaves_what_the_folder_tells(listing, root):
    there = size(root / "step-000000030")
    (root / "step-000000030" / "manifest.json").write_text("")
    code, lines, _ = listing("runs/a")
    assert (code, lines[2].split(" damaged: ")[0]) == (1, f"30 ? {there} ? ? nothing")
    assert lines[1] == rows(root)[0]


def test_when_none_is_whole(listing, root):
    for folder in layout.listed(root):
        os.truncate(folder / "__0_0.distcp", 1)
    recipe_of(root.parent, "{keep: 1, best: accuracy}")
    code, lines, _ = listing("runs/a")
    assert code == 1
    assert [re.search(r" [hd] 2 (.*) damaged: ", line)[1] for line in lines[1:5]] == [
        "accuracy 0.9000 lack of a whole one",
        "lack of a whole one",
        "accuracy 0.9155 best",
        "accuracy 0.7000 lack of a whole one",
    ]
    assert lines[5:] == ["a resume finds none that is whole; a run can start afresh under another run.name"]


# ---- what lies beside them


def test_set_aside_and_leftovers_are_counted(listing, root):
    for name in ("step-000000050.tmp-0a1b2c3d", "step-000000010.tmp-deleted"):
        (root / name).mkdir()
        (root / name / "__0_0.distcp").write_bytes(bytes(700))
    kept = root / "set-aside-20260101-120000-step-000000060"
    shutil.copytree(root / "step-000000040", kept)
    (root / "notes.txt").write_text("mine")
    (root / "step-000000070").mkdir()  # without a manifest it does not exist
    code, lines, _ = listing("runs/a")
    assert (code, lines[1:5]) == (0, rows(root))
    weight = decimal(sum(file.stat().st_size for file in kept.iterdir()))
    assert lines[6:] == [
        f"1 set aside when the run went back to an older one ({weight}): kept until you delete set-aside-* by hand",
        "2 unfinished (1.4 kB): being saved now, or leftovers of saves that were killed, which the next save deletes",
    ]
    retention.tidy(root, CheckpointSection(keep=9))
    assert listing("runs/a")[1] == lines[:7], "the next save leaves what was set aside and nothing else"


def test_one_that_was_set_aside_is_listed_by_its_name(listing, root):
    kept = (root / "step-000000040").rename(root / "set-aside-20260101-120000-step-000000040")
    code, lines, _ = listing(kept, "--verify")
    assert (code, lines[1]) == (0, f"40 4 {size(kept)} 2 h 2 accuracy 0.9000 set aside verified")
    assert lines[2:] == [f"a resume takes step-000000030{DOUBT}"]
    (kept / "manifest.json").write_text("{")
    assert listing(kept)[1][1].startswith(f"40 ? {size(kept)} ? ? set aside damaged: cannot be read: ")


# ---- none, and no run


def test_a_run_without_checkpoints_says_so(listing, tmp_path):
    run = recipe_of(tmp_path / "runs" / "young")
    for options in ([], ["--verify"]):
        assert listing("runs/young", *options) == (0, ["runs/young has no checkpoint yet"], "")
    (run / "checkpoints" / "step-000000007").mkdir(parents=True)
    assert listing("runs/young") == (0, ["runs/young has no checkpoint yet"], "")
    (run / "checkpoints" / "step-000000007.tmp-1").mkdir()
    code, lines, _ = listing("runs/young/checkpoints")
    assert (code, lines[0]) == (0, "runs/young/checkpoints has no checkpoint yet")
    assert [line.partition(":")[0] for line in lines[1:]] == ["1 unfinished (0 bytes)"]


@pytest.mark.parametrize("path", [".", "..", "runs/none", "checkpoints", "a.yaml", "/dev/null", "/", "step-000000040"])
def test_what_is_no_run_is_told_in_one_line(listing, saved, tmp_path, path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "a.yaml").write_text("run: {}")
    shutil.copytree(saved / "step-000000040", tmp_path / "step-000000040")
    code, lines, err = listing(path)
    assert (code, lines) == (2, [])
    missing = {"runs/none": "there is no such folder", "a.yaml": "it is a file", "/dev/null": "it is a file"}
    what = missing.get(path, "there is no recipe.yaml in it")
    assert err == f"{path} is no run: {what} (runs are folders such as runs/NAME)\n"


def test_a_recipe_that_is_wrong_and_a_folder_that_is_none(listing, root):
    shutil.rmtree(root)
    root.write_text("")
    code, lines, err = listing("runs/a")
    assert (code, lines, err) == (2, [], f"cannot look at the checkpoints in {root}: Not a directory\n")
    (root.parent / "recipe.yaml").write_text("checkpoint: {keeps: 3}")
    code, lines, err = listing("runs/a")
    assert (code, lines) == (2, [])
    assert "checkpoint.keeps: unknown key" in err and "Traceback" not in err


# ---- while the run goes on


@pytest.mark.parametrize("every_byte", [False, True])
@pytest.mark.parametrize(
    "vanish", [retention.remove, shutil.rmtree, lambda folder: (folder / layout.MANIFEST).unlink()], ids=range(3)
)
def test_what_vanishes_while_it_is_looked_at_is_left_out(root, every_byte, vanish):
    """Deleted at the worst moment: it has been listed, and its files are opened next."""
    section = CheckpointSection(keep=2, best="accuracy", keep_every_hours=6)

    def reading(folder):
        if folder in (root / "step-000000040", root / "step-000000020"):
            vanish(folder)

    found = inventory.take_inventory(root, section, every_byte=every_byte, on_check=reading)
    assert [(layout.step_of(entry.folder), entry.problem) for entry in found.entries] == [(30, None), (10, None)]
    assert [entry.kept_for for entry in found.entries] == [["newest", "every 6 h"], ["newest", "best", "every 6 h"]]
    assert (found.resumed, found.num_finished) == (root / "step-000000030", 2)
    only = root / "step-000000030"
    found = inventory.take_inventory(
        root, section, every_byte=every_byte, only=only, on_check=lambda f: f == only and vanish(f)
    )
    assert (found.entries, found.resumed) == ([], root / "step-000000010")


# ---- how it looks


def shown(found, section, **options):
    console = Console(file=io.StringIO(), highlight=False, markup=False, emoji=False, **options)
    table.show(found, section, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("best", ["accuracy", None])
def test_a_terminal_is_never_too_narrow(root, width, best):
    """Nothing is cut, no number is parted from its name, and the reason of a damage can be read in one line."""
    os.truncate(root / "step-000000020" / "__0_0.distcp", 100)
    section = CheckpointSection(keep=2, best=best, keep_every_hours=6)
    found = inventory.take_inventory(root, section)
    text = shown(found, section, width=width, force_terminal=True)
    assert "\x1b[31mdamaged" in text
    lines = plain(text)
    assert lines[0] == HEADER
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= width
    assert "…" not in text
    numbers = {f"{name} {value:.4f}" for values in METRICS for name, value in values.items() if best in (None, name)}
    assert not [each for each in numbers if each not in "\n".join(lines)]
    assert len([line for line in lines if " has 100 bytes instead of " in line]) == 1
    assert len([line for line in lines if line.startswith("a resume takes step-000000040")]) == 1


def test_elsewhere_a_row_is_one_line_without_colour(root):
    (root / "step-000000020" / f"{'long ' * 40}name").write_text("")
    found = inventory.take_inventory(root, CheckpointSection())
    text = shown(found, CheckpointSection(), width=80)
    assert "\x1b" not in text
    assert [line.split()[0] for line in plain(text)[1:5]] == ["40", "30", "20", "10"]
    assert plain(text)[3].endswith("long name")


def test_it_is_found_without_torch():
    code = "import sys, lockstep.checkpoint.inventory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
