"""Configs that nobody writes by intention: each has one clear line, at once, and nothing is trained by accident."""

import os
import socket

import pytest

from lockstep.base import config
from lockstep.base.errors import ConfigError, printable
from lockstep.base.yaml_text import MOST_BYTES
from lockstep.recipe.recipe import Recipe, contradictions, load

LAUGHS = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 'lol'}]" for i in range(12))
"""10^11 values in 12 lines."""
TEXTS = {
    "billion laughs": (LAUGHS, "c.yaml:1: c.yaml holds more than 20,000 values once its aliases"),
    "many keys": ("".join(f"a{i}: 1\n" for i in range(30_000)), "c.yaml:20000: c.yaml holds more than"),
    "deep lists": ("run: " + "[" * 100 + "]" * 100, "c.yaml:1: run.0: this is nested too deep"),
    "very deep lists": ("run: " + "[" * 5000, "c.yaml: this is nested too deep"),
    "deep mappings": ("run: " + "{a: " * 90 + "1" + "}" * 90, "c.yaml:1: run.a: this is nested too deep"),
    "merge": ("train: &t {epochs: 1}\noptim: {<<: *t}\n", "c.yaml:2: optim: merging (<<) is not known here"),
    "own tag": ("train: !mine {epochs: 1}\n", "c.yaml:1: train: the tag '!mine' is not known"),
    "set": ("train: !!set {epochs}\n", "c.yaml:1: train: the tag 'tag:yaml.org,2002:set' is not known"),
    "bytes": ("run:\n  name: !!binary YQ==\n", "c.yaml:2: run.name: the tag"),
    "object": ("run: !!python/object/apply:os.system [ls]\n", "c.yaml:1: run: the tag"),
    "date": ("run:\n  name: 2024-01-01\n", "c.yaml:2: run.name: '2024-01-01' is a date to YAML: put it in quotes"),
    "no date": ("run:\n  name: 2024-99-99\n", "c.yaml:2: run.name: '2024-99-99' is a date to YAML"),
    "octal": ("train:\n  steps: 010\n", "c.yaml:2: train.steps: '010' is an octal number to YAML: write 10,"),
    "no octal": ("run:\n  name: 007\n", "c.yaml:2: run.name: '007' is an octal number to YAML: write 7,"),
    "sixtieths": ("train:\n  steps: 1:30\n", "c.yaml:2: train.steps: should be a valid integer"),
    "half a character": ('run:\n  name: "\\ud800"\n', "c.yaml:2: run.name: holds '\\ud800', which is half"),
    "half a character in a key": ('run:\n  "\\udc80": 1\n', "c.yaml:2: a key holds '\\udc80', which is half"),
    "control character": ('run:\n  name: "a\\e[31m"\n', "c.yaml:2: run.name: a run's name is one folder"),
    "control character in a key": ('"a\\e[31m": 1\n', "c.yaml:1: a\\x1b[31m: unknown key"),
    "other folder": ("run:\n  name: ../a\n", "c.yaml:2: run.name: a run's name is one folder"),
    "folder above": ("run:\n  name: ..\n", "c.yaml:2: run.name: a run's name is one folder"),
    "long name": (f"run:\n  name: {'é' * 101}\n", "c.yaml:2: run.name: a run's name is at most 200 bytes long"),
    "device": ("run:\n  name: nul.txt\n", "c.yaml:2: run.name: to Windows this is a device"),
    "infinite option": ("observe:\n  options: {a: [.inf]}\n", "c.yaml:2: observe.options.a.0: should be a finite"),
    "large option": (f"observe:\n  options: {{a: 0x{'f' * 9000}}}\n", "c.yaml:2: observe.options.a: 0xfff"),
    "digits": (f"train:\n  steps: {'9' * 9000}\n", "c.yaml:2: train.steps: '99999"),
}
SETTINGS = {
    "train.steps=99999999999999999999": "train.steps: 99999999999999999999 is no number that fits in 64 bits",
    "train.steps='99999999999999999999'": "train.steps: should be less than or equal to 1000000000",
    "train.epochs=1e308": "train.epochs: should be less than or equal to 1000000",
    "train.epochs=1e-320": "train.epochs: should be between 1e-30 and 1e+30",
    "train.global_batch=9223372036854775808": "train.global_batch: 9223372036854775808 is no number that fits",
    "train.global_batch=9223372036854775807": "train.global_batch: should be less than or equal to 1000000000",
    "train.global_batch=100000000": "train.global_batch: a step would have 6,250,000 micro-batches",
    "train.max_minutes=1e300": "train.max_minutes: should be less than",
    "optim.lr=1e-320": "optim.lr: should be between 1e-30 and 1e+30, where it is not 0",
    "optim.lr=1e30": "optim.lr: should be less than",
    "optim.weight_decay=1e-40": "optim.weight_decay: should be between",
    "schedule.warmup=1e18": "schedule.warmup: should be less than",
    "schedule.warmup=2.5": "schedule.warmup: should be a fraction of the run, from 0 to 1, or a whole number",
    "run.seed=9223372036854775808": "run.seed: 9223372036854775808 is no number that fits",
    "run.threads=1e9": "run.threads: should be less than",
    "parallel.bucket_mb=1e308": "parallel.bucket_mb: should be less than",
    "observe.hang_seconds=1e300": "observe.hang_seconds: should be less than",
    "data.workers=1000000": "data.workers: should be less than",
    "data.limit=1e18": "data.limit: should be less than",
    "checkpoint.every_minutes=1e300": "checkpoint.every_minutes: should be less than",
    "checkpoint.keep=9e18": "checkpoint.keep: should be less than",
    "launch.nodes=99999999999": "launch.nodes: should be a number of machines",
    "launch.processes=99999": "launch.processes: should be less than or equal to 4096",
    "launch.environment={A=B: c}": "launch.environment: 'A=B' cannot be the name of a variable",
    "launch.environment={'': c}": "launch.environment: '' cannot be the name of a variable",
    'launch.environment={"a\\0b": c}': "launch.environment: 'a\\x00b' cannot be the name of a variable",
    'launch.environment={A: "b\\0c"}': "launch.environment: the value of A holds a zero byte",
    "launch.environment={A: 1}": "launch.environment.A: should be text: put it in quotes",
    "launch.environment={NCCL_TIMEOUT: '60'}": "launch.environment: leave out NCCL_TIMEOUT, which neither NCCL nor",
    "launch.environment={RANK: '1'}": "launch.environment: leave out RANK: the launcher sets it",
    "run.name=\udc80": "run.name: holds '\\udc80', which is half a character",
    "run.\udc80=1": "a key holds '\\udc80', which is half a character",
}


def said(call):
    """The one line of a refusal."""
    with pytest.raises(ConfigError) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def parse(text, *overrides):
    return config.parse(Recipe, text, file="c.yaml", overrides=overrides, check=contradictions)


@pytest.mark.parametrize("case", TEXTS)
def test_a_hostile_text_has_one_line(case):
    text, expected = TEXTS[case]
    assert said(lambda: parse(text)).startswith(expected)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_number_or_name_that_nobody_means_has_one_line(setting):
    assert said(lambda: parse("", setting)).startswith(f"command line: {SETTINGS[setting]}")


def test_a_warm_up_longer_than_the_run_is_refused():
    assert "schedule.warmup: 50 steps are more than the run has (train.steps=40)" in said(
        lambda: parse("schedule: {warmup: 50}\ntrain: {steps: 40}\n")
    )
    assert parse("schedule: {warmup: 40}\ntrain: {steps: 40}\n").schedule.warmup_steps(40) == 40


@pytest.mark.parametrize(("number", "value"), [("1_000", 1000), ("0x10", 16), ("+7", 7), ("1e3", 1000), ("0", 0)])
def test_other_ways_to_write_a_number_are_read(number, value):
    assert parse(f"run:\n  seed: {number}\n").run.seed == value


def _listening(path):
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(str(path))


FILES = {
    "pipe": (os.mkfifo, "c.yaml: it is a pipe, not a regular file"),
    "zeros": (lambda path: path.symlink_to("/dev/zero"), "c.yaml: it is a device, not a regular file"),
    "nothing": (lambda path: path.symlink_to("/dev/null"), "c.yaml: it is a device, not a regular file"),
    "socket": (_listening, "c.yaml: No such device or address"),
    "large": (
        lambda path: path.write_bytes(b"#" * (MOST_BYTES + 1)),
        "c.yaml: it has 131,073 bytes, more than 131,072",
    ),
    "sparse": (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40),
        "c.yaml: it has 1,099,511,627,776 bytes",
    ),
    "latin-1": (lambda path: path.write_bytes("run: {name: \xe9}".encode("latin-1")), "is not a YAML file: byte 12"),
    "utf-32": (lambda path: path.write_bytes("run:".encode("utf-32")), "is not a YAML file: byte 0"),
    "zero bytes": (lambda path: path.write_bytes(b"\0" * 99), "c.yaml:1: this is not YAML: it holds the character"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_path_that_is_no_config_has_one_line(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    make, expected = FILES[case]
    make(tmp_path / "c.yaml")
    assert expected in said(lambda: load(tmp_path / "c.yaml"))


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[31mb.yaml", "n" * 300])
def test_a_name_that_no_file_has(tmp_path, name):
    said(lambda: load(tmp_path / name))


MACHINE = {
    "launch.interface=nope0": "launch.interface=nope0: this machine has no network interface 'nope0'",
    "launch.interface=lo,nope0": "this machine has no network interface 'nope0'",
    "run.threads=300": "run.threads=300 on the ",
    "launch.processes=4000": "launch.processes=4000 on the ",
}


@pytest.mark.parametrize("setting", MACHINE)
@pytest.mark.parametrize("kind", ["local", "spawn"])
def test_what_this_machine_lacks_is_told_before_anything_is_started(commands, tmp_path, kind, setting):
    (tmp_path / "c.yaml").write_text("")
    found = commands.answer(["train", "c.yaml", f"launch.kind={kind}", setting, "--dry-run"], folder=tmp_path)
    assert (found.kind, found.code) == ("message", 2), found
    assert found.output.count("\n") == 1 and MACHINE[setting] in found.output


def test_an_error_shows_what_a_terminal_would_obey():
    assert printable("a\x1b[2J\tb\nc\u2028\ud800\x9b") == "a\\x1b[2J\tb\nc\\u2028\\ud800\\x9b"
    assert str(ConfigError("folder \x1b[31m")) == "folder \\x1b[31m"
