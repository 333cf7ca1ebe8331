"""The command line as people use and misuse it: what is printed, what is written, and the exit code."""

import pathlib
import re
import subprocess
import sys

import pytest
import warm
import yaml
from places import EXAMPLES
from typer.testing import CliRunner

from lockstep.base import config, plugins
from lockstep.checkpoint.layout import Manifest, folder_of
from lockstep.cli import _app
from lockstep.cli._common import console, shipped_folder
from lockstep.recipe.recipe import load, starter, tasks
from lockstep.recipe.run_paths import run_of

SOURCES = plugins.names("data.sources")
CONFIGS = sorted(EXAMPLES.glob("*.yaml"))
COMMANDS = plugins.names("cli")


@pytest.fixture
def lockstep(tmp_path, monkeypatch):
    """Runs a command in an empty folder -> (exit code, stdout, stderr); an error of ours is no exit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(console, "width", 200)  # made, with another width, by whichever test came first

    def run(*arguments):
        result = CliRunner().invoke(_app.app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


def refused(result, *fragments):
    """Exit code 2, nothing on stdout, and one line that says so."""
    code, out, err = result
    assert (code, out) == (2, ""), result
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert not [fragment for fragment in fragments if fragment not in err], err


def all_files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def run_folder(folder, step=None):
    """A run as it lies on disk, and with a manifest also a checkpoint, of another place than it was made in."""
    folder.mkdir(parents=True)
    recipe = config.parse(type(starter("digits")), "run: {dir: /elsewhere, name: old}", file="made here")
    (folder / "recipe.yaml").write_text(config.dump(recipe), encoding="utf-8")
    if step:
        checkpoint = folder_of(folder / "checkpoints", step)
        checkpoint.mkdir(parents=True)
        manifest = Manifest(step=step, epoch=1, world_size=1, saved_at=0.0, numeric={}, progress={})
        (checkpoint / "manifest.json").write_text(manifest.text(), encoding="utf-8")
    return folder


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_alone_it_shows_its_commands(lockstep, arguments):
    code, out, err = lockstep(*arguments)
    assert code == (0 if arguments else 2)
    assert not [name for name in COMMANDS if name not in out + err]
    assert {"train", "evaluate", "export", "compare", "data", "init", "plugins"} <= set(COMMANDS)


def test_each_command_has_a_panel():
    assert sorted(name for names in _app.PANELS.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(lockstep, command):
    code, out, _ = lockstep(command, "--help")
    assert code == 0
    assert "Usage:" in out and f" {command} " in out
    summary = out.split("Usage:")[1].splitlines()[2].strip()
    assert summary.endswith("."), summary


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "a.yaml", "--nosuch"], ["plugins", "extra"]])
def test_wrong_usage_is_told(lockstep, arguments):
    code, out, err = lockstep(*arguments)
    assert (code, out) == (2, "")
    assert "Usage:" in err and "Error" in err and "Traceback" not in err


def test_plugins_lists_every_plugin_file(lockstep):
    code, out, _ = lockstep("plugins")
    assert code == 0
    for title, family in plugins.FAMILIES.items():
        folder = plugins.ROOT.joinpath(*family.split("."))
        rows = [line for line in out.split(title, 1)[1].splitlines() if "│" in line]
        files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("_"))
        assert files
        for file, row in zip(files, rows[: len(files)], strict=True):
            name, description = [cell.strip() for cell in row.strip("│ ").split("│")]
            assert (name, len(description) > 10) == (file.stem, True)


@pytest.mark.parametrize("task", tasks())
def test_init_writes_a_config_to_start_from(lockstep, tmp_path, task):
    code, out, err = lockstep("init", task)
    assert (code, err) == (0, "")
    wanted = ["user.py", "user.yaml"] if task == "user" else [f"{task}.yaml"]
    assert out == f"wrote {' and '.join(reversed(wanted))}; next: lockstep train {task}.yaml\n"
    assert all_files(tmp_path) == wanted
    file = tmp_path / f"{task}.yaml"
    assert load(file) == starter(task)
    assert task in (load(file).data.kind, load(file).model.kind)
    assert lockstep("train", file.name, "--dry-run")[0] == 0


def test_init_explains_every_setting(lockstep, tmp_path):
    """With every comment mark before a key taken away, the file says the same: what it shows are the defaults."""
    assert lockstep("init")[0] == 0
    text = (tmp_path / "digits.yaml").read_text(encoding="utf-8")
    (tmp_path / "all.yaml").write_text(text.replace("\n  #", "\n  ").replace("\n   ", "\n  #"), encoding="utf-8")
    recipe = starter("digits")
    assert load(tmp_path / "all.yaml") == load(tmp_path / "digits.yaml") == recipe
    given = yaml.safe_load((tmp_path / "all.yaml").read_text(encoding="utf-8"))
    for name in type(recipe).model_fields:
        section = type(getattr(recipe, name))
        assert list(given[name]) == list(section.model_fields)
        for key, field in section.model_fields.items():
            before = re.split(rf"\n  #?{key}: ", text.split(f"\n{name}:")[1])[0]
            assert field.description.splitlines()[-1] in before, (name, key)


def test_init_copies_an_example(lockstep, tmp_path):
    assert lockstep("init", "examples/digits") == (0, "wrote digits.yaml; next: lockstep train digits.yaml\n", "")
    assert load(tmp_path / "digits.yaml") == load(EXAMPLES / "digits.yaml")
    assert "#   lockstep train digits.yaml\n" in (tmp_path / "digits.yaml").read_text()
    refused(lockstep("init", "examples/digits"), "digits.yaml exists", "--to")
    refused(lockstep("init", "examples/digit"), "there is no example 'digit'", "did you mean 'digits'?")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lockstep tra", {"train"}),
        ("lockstep train c.yaml train.mi", {"train.micro_batch="}),
        ("lockstep train c.yaml parallel.repl", {"parallel.replicas="}),  # of some strategies only
        ("lockstep profile c.yaml --st", {"--steps"}),
    ],
)
def test_a_shell_completes_commands_and_settings(tmp_path, typed, offered):
    words = typed.split()
    asked = {"_LOCKSTEP_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    command = [
        "env",
        *(f"{key}={value}" for key, value in asked.items()),
        str(pathlib.Path(sys.executable).with_name("lockstep")),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


def test_init_lists_what_there_is(lockstep, tmp_path):
    code, out, err = lockstep("init", "--list")
    assert (code, err, all_files(tmp_path)) == (0, "", [])
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in out.splitlines() if "│" in line]
    assert [row[0] for row in rows if row[0]] == [
        *tasks(),
        *(f"examples/{name}" for name in ("ag_news", "digits", "gpt", "mnist")),
    ]
    assert {row[0]: row[2] for row in rows if row[0]}["ag_news"] == "transformer"


@pytest.mark.parametrize("example", CONFIGS, ids=lambda path: path.stem)
def test_init_starts_where_the_examples_do(example):
    """A pretrained encoder above all: a tenth of the rate of a fresh network, and a warm-up."""
    ours, theirs = load(example), starter(example.stem)
    assert (theirs.optim, theirs.schedule) == (ours.optim, ours.schedule)
    same = ("epochs", "global_batch", "micro_batch")
    assert [getattr(theirs.train, name) for name in same] == [getattr(ours.train, name) for name in same]


@pytest.mark.parametrize("task", [task for task in SOURCES if starter(task).model.kind == "transformer"])
def test_init_is_gentle_with_what_is_pretrained(task):
    found = starter(task)
    assert (found.optim, found.schedule) == (starter("ag_news").optim, starter("ag_news").schedule)
    assert found.optim.lr == 1e-4 and found.schedule.warmup > 0


@pytest.mark.parametrize("there", ["user.py", "user.yaml"])
def test_init_leaves_code_alone(lockstep, tmp_path, there):
    """Neither file is written where one of them exists."""
    (tmp_path / there).write_text("mine")
    refused(lockstep("init", "user"), f"{there} exists and is not overwritten", "--to")
    assert all_files(tmp_path) == [there]
    assert (tmp_path / there).read_text() == "mine"
    assert lockstep("init", "user", "--to", "own.yaml")[0] == 0
    assert load(tmp_path / "own.yaml").data.file == tmp_path / "own.py"
    refused(lockstep("init", "user", "--to", "x.py"), "name a YAML file")


@pytest.mark.parametrize("task", ["user", "files"])
def test_what_init_writes_trains(lockstep, tmp_path, minilm, task):
    """As it is; `files` on texts where it looks for them, with an encoder that needs no network."""
    assert lockstep("init", task)[0] == 0
    settings = ["train.epochs=1", "run.name=a"]
    if task == "files":
        settings += [f"model.name={minilm}", "model.max_length=16", "train.epochs=0.3"]
        (tmp_path / "data").mkdir()
        rows = [f"{word} number {number},{word}" for number in range(30) for word in ("good", "bad")]
        (tmp_path / "data" / "train.csv").write_text("\n".join(["text,label", *rows]))
    done = warm.run(["lockstep.run.worker", f"{task}.yaml", *settings], cwd=tmp_path, timeout=150)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "finished after" in done.stdout
    assert "auroc" in done.stdout or task == "files"


@pytest.mark.parametrize("to", ["digits.yaml", "folder"])
def test_init_refuses_to_overwrite(lockstep, tmp_path, to):
    (tmp_path / "digits.yaml").write_text("mine")
    (tmp_path / "folder").mkdir()
    refused(lockstep("init", "digits", "--to", to), f"{to} exists", "--to")
    assert (tmp_path / "digits.yaml").read_text() == "mine"
    assert all_files(tmp_path) == ["digits.yaml", "folder"]


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("eval", "evaluate"), ("Compare", "compare")])
def test_a_misspelt_command_is_recognized(lockstep, typed, meant):
    code, _, err = lockstep(typed, "a.yaml")
    assert code == 2 and f"No such command {typed!r} — did you mean {meant!r}?" in err


def test_help_fills_its_lines(lockstep):
    """Of any width: the line breaks of the source are not kept."""
    assert "both have logged, the digests of the weights, evaluations" in lockstep("compare", "--help")[1]


def test_a_lesson_is_shown_as_it_is_in_its_file(lockstep, monkeypatch):
    monkeypatch.setattr(console, "width", 40)
    code, out, _ = lockstep("learn", "5", "--show")
    assert code == 0 and out == next(shipped_folder("lessons").glob("05_*.py")).read_text()


def test_doctor_without_slurm(lockstep, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    refused_after_a_word = lockstep("doctor", CONFIGS[0], "launch.kind=slurm")
    assert refused_after_a_word[0] == 2 and "there is no srun here: launch.kind=slurm" in refused_after_a_word[2]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["init", "digit"], ["there is no 'digit'", "did you mean 'digits'?"]),
        (["init", "zzz"], ["there is no 'zzz'", *SOURCES]),
        (["init", "digits", "--to", "nowhere/a.yaml"], ["there is no folder nowhere", "--to"]),
        (["train", "a.yaml"], ["there is no file a.yaml", "lockstep init"]),
        (["train", "train.epochs=3"], ["there is no file train.epochs=3"]),
        (["train", "."], [". is a folder", "RUN/recipe.yaml"]),
        (["data", "a.yaml"], ["there is no file a.yaml"]),
        (["evaluate", "."], [". is no run", "recipe.yaml", "runs/NAME"]),
        (["evaluate", "runs/none"], ["runs/none is no run"]),
        (["export", "."], [". is no run"]),
        (["export", "/dev/null"], ["/dev/null is no run, no checkpoint and no export: it is a file"]),
        (["status", "/dev/null"], ["/dev/null is no run", "it is a file"]),
        (["compare", ".", "runs/b"], [". is no run, no checkpoint", "runs/NAME"]),
    ],
)
def test_mistakes_are_told_in_one_line(lockstep, tmp_path, arguments, fragments):
    refused(lockstep(*arguments), *fragments)
    assert all_files(tmp_path) == []


def test_a_line_per_complaint(lockstep, tmp_path):
    (tmp_path / "a.yaml").write_text("train:\n  epoch: 3\n  global_batch: yes\n")
    code, out, err = lockstep("train", "a.yaml", "data.kind=digit")
    assert (code, out) == (2, "")
    assert [line[:40].split(": ")[:2] for line in sorted(err.splitlines())] == [
        ["a.yaml:2", "train.epoch"],
        ["a.yaml:3", "train.global_batch"],
        ["command line", "data.kind"],
    ]


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_run_without_checkpoint(lockstep, tmp_path, command):
    run = run_folder(tmp_path / "runs" / "young")
    there = all_files(tmp_path)
    refused(lockstep(command, "runs/young"), "no finished checkpoint", f"lockstep train {run}/recipe.yaml")
    (run / "checkpoints" / "step-000000007.tmp-1").mkdir(parents=True)
    (run / "checkpoints" / "step-000000007").mkdir()
    refused(lockstep(command, "runs/young"), "no finished checkpoint")
    refused(lockstep(command, "runs/young", "optim.lr=x"), "command line: optim.lr: ")
    assert [name for name in all_files(tmp_path) if "checkpoints" not in name] == there


def test_run_that_was_moved_is_found_where_it_lies(tmp_path):
    run = run_folder(tmp_path / "moved é" / "1e3", step=7)
    for named in (run, run / "checkpoints" / "step-000000007"):
        recipe, checkpoint = run_of(named, ["optim.lr=7"])
        assert recipe.folder == run
        assert checkpoint == run / "checkpoints" / "step-000000007"
        assert recipe.optim.lr == 7
    assert run_of(run, [f"run.dir={tmp_path}"])[0].folder == tmp_path / "1e3"


def test_a_folder_of_a_run_that_was_given_an_odd_name(lockstep, tmp_path):
    run = run_folder(tmp_path / "runs" / "a (1)", step=7)
    for words in (("evaluate", run), ("checkpoints", run), ("train", run / "recipe.yaml")):
        refused(lockstep(*words), f"{run}: rename this folder")
    assert run_of(run, ["run.name=b"])[0].folder == tmp_path / "runs" / "b"


@pytest.mark.parametrize("example", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_shows_plan_and_recipe_and_writes_nothing(lockstep, tmp_path, example):
    name = f"run.name={'n' * 150}.dry"
    code, out, err = lockstep(
        "train",
        example,
        name,
        "train.global_batch=96",
        "launch.processes=3",
        "run.threads=2",
        "--dry-run",
        "--verbose",
        "--resume",
        "never",
    )
    assert code == 0 and all(line.startswith("warning: ") for line in err.splitlines())
    folder = tmp_path / "runs" / name[9:]
    plan, _, recipe = out.partition(f"# {folder / 'launch.yaml'}\n")
    assert plan.splitlines() == [
        "OMP_NUM_THREADS=2",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        f"3 x {sys.executable} -P -m lockstep.run.worker {folder / 'launch.yaml'} --resume never",
        "",
    ]
    assert all_files(tmp_path) == []
    shown = tmp_path / "shown.yaml"
    shown.write_text(recipe, encoding="utf-8")
    assert load(shown) == load(example, [name, "train.global_batch=96", "launch.processes=3", "run.threads=2"])
    assert load(shown).train.global_batch == 96


def test_dry_run_tells_of_idle_processes_and_leaves_out_the_settings(lockstep):
    words = ("train.global_batch=64", "train.micro_batch=32", "--dry-run")
    code, out, err = lockstep("train", CONFIGS[0], "launch.processes=3", *words)
    assert code == 0 and "global_batch: 64" not in out and "--verbose prints it" in out
    assert "warning: 1 of 3 processes will be idle: a step has 2 micro-batches" in err
    assert lockstep("train", CONFIGS[0], "launch.processes=2", *words)[2] == ""
    submitted = lockstep("train", CONFIGS[0], "launch.kind=slurm", "launch.nodes=2", "launch.gpus=4", *words)[2]
    assert "warning: 6 of 8 processes will be idle" in submitted


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_node_rank_out_of_range(lockstep, command):
    words = ("--rendezvous", "127.0.0.1:29400", "--node-rank", "2")
    refused(lockstep(command, CONFIGS[0], "launch.nodes=1:2", *words), "--node-rank 2", "launch.nodes=2", "0 to 1")


def test_what_is_printed_is_what_is_meant(lockstep, tmp_path):
    """Nothing in a path is taken for colour or a small picture."""
    odd = tmp_path / "[red]:100:x"
    odd.mkdir()
    code, out, _ = lockstep("init", "--to", f"{odd}/a.yaml")
    assert (code, out) == (0, f"wrote {odd}/a.yaml; next: lockstep train {odd}/a.yaml\n")
    assert (
        f"# {odd}/x/launch.yaml" in lockstep("train", f"{odd}/a.yaml", f"run.dir={odd}", "run.name=x", "--dry-run")[1]
    )


def test_name_of_a_run_comes_from_the_file_and_the_time(lockstep, tmp_path):
    (tmp_path / "my.first.yaml").write_text("")
    _, out, _ = lockstep("train", "my.first.yaml", "--dry-run", "--verbose")
    name = yaml.safe_load(out.partition("# ")[2].partition("\n")[2])["run"]["name"]
    assert name.startswith("my-first-2") and name.count("-") == 3


def test_folder_of_runs_that_cannot_be_written(lockstep, tmp_path):
    (tmp_path / "a.yaml").write_text("run:\n  dir: a.yaml\n")
    refused(lockstep("train", "a.yaml"), "cannot write to ", "Not a directory", "run.dir")
    assert all_files(tmp_path) == ["a.yaml"]


@pytest.mark.parametrize(
    ("command", "code", "fragments"),
    [
        (
            [pathlib.Path(sys.executable).with_name("lockstep"), "train"],
            2,
            ["a.yaml:2: train.epoch: unknown key", "'epochs'?"],
        ),
        ([sys.executable, "-m", "lockstep.run.worker"], 2, ["a.yaml:2: train.epoch: unknown key", "'epochs'?"]),
    ],
    ids=["lockstep", "worker"],
)
def test_real_process_ends_with_a_line_and_a_code(tmp_path, command, code, fragments):
    (tmp_path / "a.yaml").write_text("train:\n  epoch: 3\n")
    done = subprocess.run([*command, "a.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert not [fragment for fragment in fragments if fragment not in done.stderr]
    assert all_files(tmp_path) == ["a.yaml"]


def test_real_process_shows_help():
    command = pathlib.Path(sys.executable).with_name("lockstep")
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not [name for name in COMMANDS if name not in done.stdout]
