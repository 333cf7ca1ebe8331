"""Code from a folder that this user did not make: asked about on a terminal, refused elsewhere, never just executed."""

import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from crafting import CANARY
from fuzzing import table

from lockstep.base import storage, trust
from lockstep.base.errors import UntrustedCode
from lockstep.run import recipe as recipes
from lockstep.run import recipe_trust

MARK = f"import os\nopen(os.path.join({{folder!r}}, {CANARY!r}), 'w').close()\n"
CODE = """
from helper import WIDTH
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, batch):
        return self.head(self.body((batch["image"] / 16).flatten(1)).relu())


def build(options, spec):
    return Mine()
"""
CONFIG = """
run: {dir: runs, name: one}
data: {kind: digits, limit: 64}
model: {kind: user, file: model.py}
train: {steps: 2, global_batch: 16, micro_batch: 8}
checkpoint: {every_steps: 2}
evaluate: {micro_batch: 512}
observe: {sinks: []}
launch: {processes: 1}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, commands):
    """A run and its export, by somebody who is allowed everything; the record of it goes with him."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(CODE)
    (folder / "helper.py").write_text("WIDTH = 8\n")
    (folder / "c.yaml").write_text(CONFIG)
    for words in (["worker", "c.yaml"], ["export", "runs/one"]):
        answer = commands.answer(words, folder=folder, seconds=60)
        assert answer.kind == "done", answer.output
    shutil.copy(folder / "helper.py", folder / "runs/one/export")
    return folder


@pytest.fixture
def stranger(made, tmp_path):
    """The same from somebody else, whose every Python file leaves the canary when it is executed."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    recipe = tmp_path / "runs/one/recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(made), str(tmp_path)))
    for file in tmp_path.rglob("*.py"):
        file.write_text(MARK.format(folder=str(tmp_path)) + file.read_text())
    shutil.copy(made / "c.yaml", tmp_path / "runs/one/launch.yaml")
    (tmp_path / "in.csv").write_text("path\nno.png\n")
    (tmp_path / "images").mkdir()
    save_image(tmp_path / "images/a.png")
    return tmp_path


def save_image(file):
    from PIL import Image

    Image.new("L", (8, 8), 3).save(file)


RUN, EXPORT = "runs/one", "runs/one/export"
OPENING = [
    *(["evaluate", place, "launch.processes=1"] for place in (RUN, f"{RUN}/checkpoints", EXPORT)),
    ["export", RUN, "--to", "out"],
    ["export", RUN, "--space", "--to", "out"],
    *(["predict", place, "images", "--out", "p.csv", "--processes", "1"] for place in (RUN, EXPORT)),
    *(["serve", place, "--port", "0"] for place in (RUN, EXPORT)),
    ["train", f"{RUN}/recipe.yaml", "train.steps=4"],
    ["data", f"{RUN}/recipe.yaml"],
    ["prove", f"{RUN}/recipe.yaml"],
    ["tune", f"{RUN}/recipe.yaml", "--micro-batch"],
    ["estimate", f"{RUN}/recipe.yaml", "--world", "1"],
    ["worker", f"{RUN}/recipe.yaml", "train.steps=4"],
    ["worker", f"{RUN}/launch.yaml", "train.steps=4"],
]


def test_no_command_executes_what_somebody_else_has_made(commands, stranger):
    answers = [(words[0], commands.answer(words, folder=stranger, seconds=60)) for words in OPENING]
    assert all(answer.kind == "message" and answer.code == 2 for _, answer in answers), [table(answers), answers]
    for _, answer in answers:
        assert "model.py (" in answer.output and "helper.py (" in answer.output and "add --trust-code" in answer.output
        assert hashlib.sha256((stranger / "model.py").read_bytes()).hexdigest() in answer.output


def test_what_only_tells_of_a_run_executes_nothing(commands, stranger):
    (stranger / RUN / "job.json").write_text('{"kind": "local", "host": "x", "process": 1, "began": 1.0}')
    for words in (["compare", RUN, RUN], ["checkpoints", RUN], ["checkpoints", RUN, "--verify"], ["status", RUN],
                  ["logs", RUN], ["train", f"{RUN}/recipe.yaml", "--dry-run"], ["plugins"]):  # fmt: skip
        answer = commands.answer(words, folder=stranger)
        assert answer.is_good and "--trust-code: " not in answer.output, (words, answer)


def test_the_option_is_enough_and_is_remembered(commands, stranger):
    words = ["evaluate", EXPORT, "launch.processes=1"]
    answer = commands.answer([*words, "--trust-code"], folder=stranger, canary="none", seconds=60)
    assert answer.kind == "done", answer.output
    assert (stranger / CANARY).exists()
    assert commands.answer(words, folder=stranger, canary="none", seconds=60).kind == "done"
    answer = commands.answer(
        ["predict", EXPORT, "images", "--out", "p.csv", "--processes", "1"], folder=stranger, canary="none", seconds=60
    )
    assert answer.kind == "done", answer.output


def test_what_this_user_has_trained_needs_no_word(commands, made, tmp_path):
    for place in (RUN, EXPORT):
        answer = commands.answer(
            ["evaluate", str(made / place), "launch.processes=1", "--to", str(tmp_path / "out")],
            folder=made,
            seconds=60,
        )
        assert answer.kind == "done", answer.output


def test_a_module_that_was_added_beside_known_code_is_not_executed(commands, made, tmp_path):
    shutil.copytree(made / EXPORT, tmp_path / "export")
    (tmp_path / "export/helper.py").write_text(MARK.format(folder=str(tmp_path)) + "WIDTH = 8\n")
    for words in (["evaluate", "export", "launch.processes=1"], ["serve", "export", "--port", "0"]):
        answer = commands.answer(words, folder=tmp_path, seconds=60)
        assert answer.kind == "message", answer
        assert "helper.py (" in answer.output and "model.py (" not in answer.output


def test_a_compiled_module_beside_the_source_is_not_executed(commands, made, tmp_path):
    shutil.copytree(made / EXPORT, tmp_path / "export")
    hostile = tmp_path / "hostile.py"
    hostile.write_text(MARK.format(folder=str(tmp_path)) + "WIDTH = 8\n")
    for name in ("model", "helper"):
        script = (
            "import sys, py_compile; py_compile.compile(sys.argv[1], sys.argv[2], "
            "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
        )
        place = tmp_path / f"export/__pycache__/{name}.{sys.implementation.cache_tag}.pyc"
        subprocess.run([sys.executable, "-c", script, hostile, place], check=True, timeout=30)
    answer = commands.answer(["evaluate", "export", "launch.processes=1"], folder=tmp_path, seconds=60)
    assert answer.kind == "done", answer


def test_standing_in_the_folder_imports_nothing_from_it(commands, made, tmp_path):
    export = shutil.copytree(made / EXPORT, tmp_path / "export")
    save_image(tmp_path / "a.png")
    for name in ("json", "torch", "multiprocessing", "lockstep", "sitecustomize", "psutil"):
        (export / f"{name}.py").write_text(MARK.format(folder=str(export)))
    for words in (
        ["evaluate", ".", "launch.processes=1", "--to", "../out"],
        ["predict", ".", "..", "--out", "../p.csv", "--processes", "1"],
    ):
        answer = commands.answer(words, folder=export, seconds=60)
        assert answer.kind == "done", answer


def test_settings_that_name_programs_count_as_code(commands, stranger):
    recipe = stranger / RUN / "recipe.yaml"
    text = recipe.read_text()
    (stranger / "sitecustomize.py").write_text(MARK.format(folder=str(stranger)))
    recipe.write_text(text.replace("environment: {}", f"environment: {{PYTHONPATH: {stranger}}}"))
    assert "PYTHONPATH" in recipe.read_text()
    for words in (["evaluate", RUN], ["train", f"{RUN}/recipe.yaml"]):
        answer = commands.answer(words, folder=stranger, seconds=60)
        assert answer.kind == "message" and "launch.environment" in answer.output, answer


def asked(words, folder, answer):
    """What a command says on a terminal, where its question is answered -> exit code, what was said."""
    ours, theirs = pty.openpty()
    process = warm.Popen(["lockstep", *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while True:
            part = os.read(ours, 4096)
            if not part:
                break
            said += part
            if b"[y/N] " in said and answer:
                os.write(ours, answer)
                answer = b""
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(timeout=60), said.decode(errors="replace")


@pytest.mark.parametrize("answer", [b"n\n", b"y\n"])
def test_a_person_is_asked(stranger, answer):
    code, said = asked(["evaluate", EXPORT, "launch.processes=1"], stranger, answer)
    assert "model.py (" in said and "bytes, sha256" in said, said
    if answer == b"y\n":
        assert code == 0 and "accuracy" in said, said
        assert (stranger / CANARY).exists()
    else:
        assert code == 2 and "--trust-code" in said, said
        assert not (stranger / CANARY).exists()


def test_without_a_place_for_the_record_it_goes_on(commands, stranger):
    answer = commands.answer(["train", "c.yaml", "run.name=mine", "model.file=" + str(stranger / "model.py")],
                             folder=stranger, canary="none", seconds=60)  # fmt: skip
    assert answer.kind == "done", answer
    assert commands.answer(_unwritable, folder=stranger, canary="none").kind == "done"


def _unwritable():
    os.environ["XDG_STATE_HOME"] = "/proc/none"
    trust.remember([trust.Code.of("x", b"x")])
    assert trust.is_known(trust.Code.of("y", b"x"))
    assert not trust.is_known(trust.Code.of("y", b"y"))


def test_the_hubs_own_code_is_never_executed(commands, tmp_path, minilm):
    folder = shutil.copytree(minilm, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "own.C", "AutoModelForSequenceClassification": "own.M"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(MARK.format(folder=str(tmp_path)) + "class C: pass\nclass M: pass\n")
    (tmp_path / "c.yaml").write_text(
        f"data: {{kind: files, train: t.csv, test: t.csv}}\nmodel: {{kind: transformer, name: {folder}}}\n"
        "train: {steps: 1}\nlaunch: {processes: 1}\n"
    )
    Path(tmp_path, "t.csv").write_text("text,label\na,b\nc,d\n" * 20)
    answer = commands.answer(["data", "c.yaml"], folder=tmp_path, seconds=60)
    assert answer.kind == "message" and "auto_map" in answer.output, answer


def test_a_file_too_large_to_be_looked_through_is_code_all_the_same(commands, stranger):
    with (stranger / "model.py").open("a") as file:
        file.write("#" * 1023 + "\n")
        file.write(("#" * 1023 + "\n") * (33 << 10))
    answer = commands.answer(["data", f"{RUN}/recipe.yaml"], folder=stranger, seconds=60)
    assert (answer.kind, answer.code) == ("message", 2) and "model.py (" in answer.output, answer


def admitted(folder):
    """Whether a link from a guarded folder to a file outside is let pass."""
    trust.require_known(folder / "export")
    try:
        trust.admit(folder / "export" / "linked.py", b"of nobody that is known")
    except UntrustedCode as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        return 2
    return 0


def test_a_link_does_not_lead_out_of_the_guard(commands, tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "evil.py").write_text("")
    (tmp_path / "export/linked.py").symlink_to(tmp_path / "evil.py")
    answer = commands.answer(admitted, tmp_path, folder=tmp_path)
    assert (answer.kind, answer.code) == ("message", 2), answer


def settled(path):
    """What a launcher would pass on for a run's recipe."""
    sys.stdout.write(" ".join(recipe_trust.authorize(recipes.load(path), path, trusts=False)))
    sys.stdout.flush()


def test_known_code_is_passed_on_by_its_sum_and_not_as_trust_in_all(commands, made):
    answer = commands.answer(settled, made / RUN / "recipe.yaml", folder=made)
    assert answer.output.startswith("--known-code ") and "--trust-code" not in answer.output, answer
    assert hashlib.sha256((made / "model.py").read_bytes()).hexdigest() in answer.output


def test_a_training_imports_nothing_from_the_folder_one_stands_in(commands, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "psutil", "filelock", "torch"):
        (here / f"{name}.py").write_text(MARK.format(folder=str(here)))
    (tmp_path / "c.yaml").write_text("data: {kind: digits, limit: 32}\ntrain: {steps: 1}\nlaunch: {processes: 1}\n")
    answer = commands.answer(["train", str(tmp_path / "c.yaml"), "run.name=a"], folder=here, seconds=60)
    assert answer.kind == "done", answer


@pytest.mark.parametrize("make", [lambda file: file.symlink_to("outside"), os.mkfifo])
def test_what_is_appended_to_is_a_file_of_the_run(tmp_path, make):
    (tmp_path / "outside").write_text("mine")
    make(tmp_path / "log")
    with pytest.raises(OSError):
        storage.append(tmp_path / "log")
    assert (tmp_path / "outside").read_text() == "mine"
