"""Code from a folder that this user did not make: asked about on a terminal, refused elsewhere, never just executed."""

import hashlib
import importlib.util
import json
import os
import pty
import re
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest
import warm
from crafting import CANARY
from fuzzing import table
from markupsafe import _speedups
from running import typed

from lockstep.base import plugins, storage, trust
from lockstep.base.errors import ModelError, UntrustedCode
from lockstep.core.host import pretrained_files
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust

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


def asked(words, folder, reactions):
    """What a command says on a terminal -> exit code, what was said. `reactions` have a text and a function of the
    process and what was said so far, called once the text is there -> what is typed."""
    ours, theirs = pty.openpty()
    process = warm.Popen(["lockstep", *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, pending = "", [*reactions]
    try:
        while part := os.read(ours, 4096):
            said += part.decode(errors="replace")
            if pending and pending[0][0] in said:
                os.write(ours, pending.pop(0)[1](process, said))
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(timeout=60), said


QUESTION = "[y/N] "


@pytest.mark.parametrize("answer", [b"n\n", b"y\n"])
def test_a_person_is_asked(stranger, answer):
    words = ["evaluate", EXPORT, "launch.processes=1"]
    code, said = asked(words, stranger, [(QUESTION, lambda *_: answer)])
    assert "model.py (" in said and "bytes, sha256" in said, said
    if answer == b"y\n":
        assert code == 0 and "accuracy" in said, said
        assert (stranger / CANARY).exists()
    else:
        assert code == 2 and "--trust-code" in said, said
        assert not (stranger / CANARY).exists()


def test_a_yes_to_settings_that_name_programs_is_enough(stranger):
    recipe = stranger / RUN / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("environment: {}", f"environment: {{MINE: {str(stranger)!r}}}"))
    code, said = asked(["evaluate", RUN, "launch.processes=1"], stranger, [(QUESTION, lambda *_: b"y\n")])
    assert code == 0 and "launch.environment of the recipe (" in said and "accuracy" in said, said


@pytest.fixture
def unknown(made, tmp_path):
    """An export with harmless code that this user does not know, and a function that exchanges it."""
    export = shutil.copytree(made / EXPORT, tmp_path / "export")
    (export / "model.py").write_text(CODE + f"# {tmp_path}\n")

    def exchange(*_):
        (export / "model.py").write_text(MARK.format(folder=str(tmp_path)) + CODE)
        return b"y\n"

    return tmp_path, exchange


@pytest.mark.parametrize("words", [["evaluate", "export", "launch.processes=1"], ["serve", "export", "--port", "0"]])
def test_a_yes_is_for_what_was_shown(unknown, words):
    folder, exchange = unknown
    code, said = asked(words, folder, [(QUESTION, exchange)])
    assert code == 2 and said.count("model.py (") == 2 and "add --trust-code" in said, said
    assert not (folder / CANARY).exists()


def test_a_yes_is_not_for_what_a_server_loads_later(unknown):
    folder, exchange = unknown
    codes = []

    def reload(process, said):
        exchange()
        url = re.search(r"http://[\w.:]+", said)[0]
        codes.append(httpx.post(f"{url}/-/reload", timeout=60).status_code)
        process.terminate()
        return b""

    said = asked(["serve", "export", "--port", "0"], folder, [(QUESTION, lambda *_: b"y\n"), ("Ctrl-C", reload)])
    assert codes == [409] and said[0] == 0, said
    assert not (folder / CANARY).exists()


def adapter(folder):
    """Make an export of an adapter of a user's model from another, where the code is not in it but at a like-named
    place below the folder one stands in."""
    facts = json.loads((folder / "export/lockstep.json").read_text())
    facts |= {"kind": "adapter", "model": {"kind": "user", "file": "model/net.py", "adapter": {"rank": 2}}}
    (folder / "export/lockstep.json").write_text(json.dumps(facts))
    (folder / "model").mkdir()
    (folder / "model/net.py").write_text(MARK.format(folder=str(folder)) + CODE)


ADAPTED = [["serve", "export", "--port", "0"], ["evaluate", "export", "launch.processes=1"],
           ["predict", "export", "images", "--out", "p.csv", "--processes", "1"]]  # fmt: skip


@pytest.mark.parametrize("place", ["elsewhere", "here", "link"])
def test_an_adapter_names_code_of_its_own_folder(commands, made, tmp_path, place):
    shutil.copytree(made / EXPORT, tmp_path / "export")
    adapter(tmp_path)
    (tmp_path / "images").mkdir()
    save_image(tmp_path / "images/a.png")
    if place == "here":
        shutil.copytree(tmp_path / "model", tmp_path / "export/model")
    elif place == "link":
        (tmp_path / "export/model").symlink_to(tmp_path / "model")
    wanted = {"elsewhere": "no file model/net.py in it", "here": "net.py (", "link": "is a link"}[place]
    for words in ADAPTED[: 3 if place == "elsewhere" else 1]:
        answer = commands.answer(words, folder=tmp_path, seconds=60)
        assert (answer.kind, answer.code) == ("message", 2) and wanted in answer.output, answer


def test_a_worker_executes_what_its_launcher_has_hashed(commands, made, tmp_path):
    """Also for a config that lies in no run's folder, such as that of a trial; on a cluster it is `lockstep train`."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    digest = hashlib.sha256((tmp_path / "model.py").read_bytes()).hexdigest()
    (tmp_path / "model.py").write_text(MARK.format(folder=str(tmp_path)) + CODE)
    for start, config in (("worker", "c.yaml"), ("worker", f"{RUN}/recipe.yaml"), ("train", "c.yaml")):
        words = [start, config, "run.name=two", f"model.file={tmp_path}/model.py", "--known-code", digest]
        answer = commands.answer(words, folder=tmp_path, seconds=60)
        assert (answer.kind, answer.code) == ("message", 2) and "model.py (" in answer.output, answer


def importing(folder, *, own):
    """Load a file that imports others by names which its text does not show."""
    file = folder / "main.py"
    codes = trust.code_with_imports(file)
    assert len(codes) == 1
    if own:
        trust.own(codes)
    else:
        trust.accept([trust.KNOWN, codes[0].digest])
    try:
        plugins.load_file(file, "model.file").load()
    except UntrustedCode as error:
        sys.stdout.write(f"{error}\n")
        sys.stdout.flush()
        return 2
    return 0


LATE = {
    "a module": ("import_module('hid' + 'den')", "hidden.py"),
    "a package": ("import_module('hid' + 'den.inner')", "hidden/__init__.py"),
    "a module of a package": ("import_module('hid' + 'den.inner')", "hidden/inner.py"),
    "a compiled module": ("import_module('_speed' + 'ups')", "_speedups.py"),
}


@pytest.mark.parametrize("what", LATE)
def test_what_is_imported_later_passes_the_gate(commands, tmp_path, what):
    statement, name = LATE[what]
    (tmp_path / "main.py").write_text(f"from importlib import import_module\n\n\ndef load():\n    {statement}\n")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/inner.py").touch()
    hidden = tmp_path / name
    if what == "a compiled module":
        hidden = tmp_path / Path(_speedups.__file__).name
        hidden.write_bytes(Path(_speedups.__file__).read_bytes() + str(tmp_path).encode())  # of nobody that is known
    else:
        hidden.write_text(MARK.format(folder=str(tmp_path)))
    answer = commands.answer(partial(importing, own=False), tmp_path, folder=tmp_path)
    assert (answer.kind, answer.code) == ("message", 2) and f"{hidden.name} (" in answer.output, answer
    answer = commands.answer(partial(importing, own=True), tmp_path, folder=tmp_path, canary="none")
    assert answer.kind == "done" and (what == "a compiled module" or (tmp_path / CANARY).exists()), answer


def exchanging(folder):
    """Load a compiled module that is exchanged after it was checked."""
    file = folder / Path(_speedups.__file__).name
    checked = trust.admit

    def admit(*args):
        checked(*args)
        file.write_bytes(b"of somebody else")

    trust.admit = admit
    trust.accept([trust.OPTION])
    loader = plugins.UserExtension("own._speedups", str(file))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("own._speedups", loader, origin=str(file)))
    assert module._escape_inner("<") == "&lt;" and module.__file__ == str(file)


def test_a_compiled_module_is_the_bytes_that_were_checked(commands, tmp_path):
    shutil.copy(_speedups.__file__, tmp_path)
    answer = commands.answer(exchanging, tmp_path, folder=tmp_path)
    assert answer.kind == "done", answer


def recording(folder):
    """Write the record with no umask, then believe it only while nobody else can write to it."""
    os.umask(0)
    os.environ["XDG_STATE_HOME"] = str(folder / "a/b")
    record, code = folder / "a/b/lockstep/trusted", trust.Code.of("x", b"x")

    def is_known():
        trust._state.known.clear()
        return trust.is_known(code)

    trust.remember([code])
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (record, *record.parents[:3])]
    assert modes == [0o600, 0o700, 0o700, 0o700], modes
    assert is_known()
    for path, mode in ((record, 0o620), (record, 0o602), (record.parent, 0o770)):
        path.chmod(mode)
        assert not is_known()
        trust.remember([code])  # anew
        assert is_known() and len(record.read_text().splitlines()) == 1
    record.rename(folder / "elsewhere")
    record.symlink_to(folder / "elsewhere")
    assert not is_known()
    if os.geteuid() == 0:
        record.unlink()
        (folder / "elsewhere").rename(record)
        os.chown(record, 65534, 65534)
        assert not is_known()


def test_a_record_that_somebody_else_could_write_is_not_believed(commands, tmp_path):
    answer = commands.answer(recording, tmp_path, folder=tmp_path)
    assert answer.kind == "done", answer


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


NAMING = {
    "auto_map": ("config.json", {"auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}, "model_type": "own"}),
    "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.T", None]}}),
    "processor": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "own.P"}}),
    "attention": ("config.json", {"_attn_implementation": "somebody/kernel"}),
    "attention of a part": ("config.json", {"attn_implementation": {"": "eager", "text_config": "somebody/kernel@v1"}}),
    "a part": ("config.json", {"text_config": [{"_experts_implementation": "somebody/kernel"}]}),
    "kernels": ("config.json", {"kernel_config": {"RMSNorm": "somebody/kernel:RMSNorm"}}),
    "another file": ("config.4.0.0.json", {"_attn_implementation": "somebody/kernel"}),
    "adapter": ("adapter_config.json", {"megatron_config": {"a": 1}, "megatron_core": "own"}),
    "adapter's module": ("adapter_config.json", {"megatron_core": "own"}),
    "checkpoint": ("config.json", {"model_args": {"checkpoint_path": "own.pt"}}),
    "weights of timm": ("config.json", {"pretrained_cfg": {}, "model_args": {"pretrained_cfg": {"file": "own.pt"}}}),
    "part of its settings": ("config.json", {"model_args": {"pretrained_cfg_overlay": {"file": "own.pt"}}}),
    "trust": ("tokenizer_config.json", {"trust_remote_code": True}),
    "hub of timm": ("config.json", {"architecture": "local-dir:own"}),
    "weights": ("config.json", {"transformers_weights": "..\\own.bin"}),
}


def test_settings_that_name_code_are_refused(commands, tmp_path, minilm):
    folder = shutil.copytree(minilm, tmp_path / "folder")
    (folder / "own.py").write_text(MARK.format(folder=str(tmp_path)) + "class C: pass\nclass M: pass\n")
    (tmp_path / "c.yaml").write_text(
        f"data: {{kind: files, train: t.csv, test: t.csv}}\nmodel: {{kind: transformer, name: {folder}}}\n"
        "train: {steps: 1}\nlaunch: {processes: 1}\n"
    )
    Path(tmp_path, "t.csv").write_text("text,label\na,b\nc,d\n" * 20)
    for name, (file, settings) in NAMING.items():
        whole = (folder / file).read_text() if (folder / file).exists() else None
        (folder / file).write_text(json.dumps(json.loads(whole or "{}") | settings))
        with pytest.raises(ModelError, match=rf"{file} names code .*which is not executed"):
            pretrained_files.check_folder(folder)
        if name in ("auto_map", "attention"):
            answer = commands.answer(["data", "c.yaml"], folder=tmp_path, seconds=60)
            assert answer.kind == "message" and f"{file} names code" in answer.output, answer
        (folder / file).unlink() if whole is None else (folder / file).write_text(whole)
    described = {"architecture": "resnet50", "pretrained_cfg": {"tag": "a1"}, "transformers_weights": "own.safetensors"}
    (folder / "more_config.json").write_text(json.dumps(described | {"megatron_core": "megatron.core"}))
    pretrained_files.check_folder(folder)


def test_settings_too_large_to_be_looked_through_are_refused(tmp_path):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", pretrained_files.MAX_CONFIG_BYTES + 1)
    with pytest.raises(ModelError, match="config.json cannot be read: it has .* bytes, more than"):
        pretrained_files.check_folder(tmp_path)


def test_the_model_that_an_adapter_names_is_looked_through(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder, names in ((base, adapter), (adapter, base)):  # one the other
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(names)}))
    pretrained_files.check_folder(adapter)
    (base / "config.json").write_text(json.dumps(NAMING["auto_map"][1]))
    with pytest.raises(ModelError, match="base/config.json names code"):
        pretrained_files.check_folder(adapter)


def test_what_is_loaded_names_no_code_when_it_is_saved(monkeypatch, minilm, tmp_path):
    """As of the hub, where transformers knows the kind and the settings name code nevertheless."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    folder = shutil.copytree(minilm, tmp_path / "folder")
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text()) | {"auto_map": {"AutoConfig": "own.C"}}
        (folder / name).write_text(json.dumps(settings))
    monkeypatch.setattr(pretrained_files, "check_folder", lambda _: None)
    for kind in (AutoConfig, AutoModel, AutoTokenizer):
        pretrained_files.load(kind, folder).save_pretrained(tmp_path / "saved")
    model, _ = pretrained_files.load(AutoModel, folder, output_loading_info=True)
    assert not hasattr(model.config, "auto_map")
    assert not any("auto_map" in file.read_text() for file in (tmp_path / "saved").glob("*.json"))


def test_no_kernel_is_fetched(minilm):
    """Where the settings come from the hub, or are those of a part that nobody looks for."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.integrations import hub_kernels

    settings = pretrained_files.load(AutoConfig, minilm)
    for kernel in ("somebody/kernel", "somebody/kernel@v1:attention"):
        settings._attn_implementation = kernel
        with pytest.raises(ModelError, match="kernel 'somebody/kernel.* of the hub, which is code"):
            pretrained_files.untrained(AutoModelForSequenceClassification, settings)
    with pytest.raises(ModelError, match="which is code"):  # what all other ways to a kernel call
        hub_kernels.get_kernel_hub("kernels-community/mra")


def test_everything_of_transformers_is_loaded_in_one_place():
    files = (file for file in plugins.ROOT.rglob("*.py") if file.name != "pretrained_files.py")
    calls = re.compile(r"\.(from_pretrained|from_config)\(|trust_remote_code")
    assert [file for file in files if calls.search(file.read_text())] == []


def test_a_file_too_large_to_be_looked_through_is_code_all_the_same(commands, stranger):
    with (stranger / "model.py").open("a") as file:
        file.write("#" * 1023 + "\n")
        file.write(("#" * 1023 + "\n") * (33 << 10))
    answer = commands.answer(["data", f"{RUN}/recipe.yaml"], folder=stranger, seconds=60)
    assert (answer.kind, answer.code) == ("message", 2) and "model.py (" in answer.output, answer


def settled(path):
    """What a launcher would pass on for a run's recipe."""
    sys.stdout.write(" ".join(recipe_trust.authorize(recipes.load(path), path, trusts=False)))
    sys.stdout.flush()


def test_known_code_is_passed_on_by_its_sum_and_not_as_trust_in_all(commands, made):
    answer = commands.answer(settled, made / RUN / "recipe.yaml", folder=made)
    assert answer.output.startswith("--known-code ") and "--trust-code" not in answer.output, answer
    assert hashlib.sha256((made / "model.py").read_bytes()).hexdigest() in answer.output


def test_a_plan_passes_on_no_more_than_is_known(commands, made):
    recipe = (made / RUN / "recipe.yaml").read_text()
    answer = commands.answer(["train", f"{RUN}/recipe.yaml", "--dry-run", "launch.kind=slurm"], folder=made)
    assert answer.kind == "done" and "--known-code " in answer.output and "--trust-code" not in answer.output, answer
    assert (made / RUN / "recipe.yaml").read_text() == recipe


def test_a_plan_holds_no_sum_of_code_that_nobody_was_shown(commands, stranger):
    words = ["train", f"{RUN}/recipe.yaml", "--dry-run", "launch.kind=slurm", "launch.environment={}"]
    answer = commands.answer(words, folder=stranger)
    digests = [hashlib.sha256((stranger / name).read_bytes()).hexdigest() for name in ("model.py", "helper.py")]
    assert answer.kind == "done" and "--known-code none" in answer.output, answer
    assert not any(digest in answer.output for digest in digests), answer


def test_a_training_imports_nothing_from_the_folder_one_stands_in(tmp_path):
    """In new interpreters: those that are forked have imported these modules."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "psutil", "filelock", "torch"):
        (here / f"{name}.py").write_text(MARK.format(folder=str(here)))
    (tmp_path / "c.yaml").write_text("data: {kind: digits, limit: 32}\ntrain: {steps: 1}\nlaunch: {processes: 1}\n")
    run = typed(here, "train", str(tmp_path / "c.yaml"), "run.name=a", "launch.kind=spawn")
    assert run.returncode == 0, run.stderr
    assert not (here / CANARY).exists()


@pytest.mark.parametrize("make", [lambda file: file.symlink_to("outside"), os.mkfifo])
def test_what_is_appended_to_is_a_file_of_the_run(tmp_path, make):
    (tmp_path / "outside").write_text("mine")
    make(tmp_path / "log")
    with pytest.raises(OSError):
        storage.append(tmp_path / "log")
    assert (tmp_path / "outside").read_text() == "mine"
