"""Configs as people write them, wrong in every way: what is said, where it points, and what loads in the end."""

import importlib
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import EXAMPLES

from lockstep.base import config, plugins, trust
from lockstep.base.errors import ConfigError, UntrustedCode, nearest
from lockstep.recipe.recipe import Recipe, contradictions, load, starter

CONFIGS = sorted(EXAMPLES.glob("*.yaml"))
SECTIONS = tuple(plugins.FAMILIES.values())
PLUGINS = [(family, name) for family in SECTIONS for name in plugins.names(family)]


def parse(text, *overrides):
    return config.parse(Recipe, text, file="c.yaml", overrides=overrides, check=contradictions)


def complaints(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return str(caught.value).split("\n")


def assert_said(lines, *expected):
    """One line for each expected one, which begins as the first and holds the others of its fragments."""
    assert len(lines) == len(expected), lines
    for line, fragments in zip(lines, expected, strict=True):
        start, *rest = [fragments] if isinstance(fragments, str) else fragments
        assert line.startswith(start)
        assert not [fragment for fragment in rest if fragment not in line], line


WRONG = {
    "unknown key": ("train:\n  epoch: 3\n", ("c.yaml:2: train.epoch: unknown key", "'epochs'?", "known here: epochs,")),
    "key of another section": (
        "train:\n  weight_decay: 1\n",
        ("c.yaml:2: train.w", "did you mean optim.weight_decay?"),
    ),
    "key of a plugin": ("train:\n  processes: 2\n", ("c.yaml:2: train.", "did you mean launch.processes?")),
    "unknown section": ("run:\ntrian:\n  epochs: 3\n", ("c.yaml:2: trian: unknown key", "'train'?")),
    "key outside its section": ("lr: 3\n", ("c.yaml:1: lr: unknown key", "did you mean optim.lr?")),
    "section in a section": ("train:\n  optim:\n    lr: 1\n", ("c.yaml:2: train.optim: ", "indent it less")),
    "key of another kind": (
        "data:\n  root: x\n  kind: digits\n",
        ("c.yaml:2: data.root: ", "known for data.kind=digits"),
    ),
    "key that is a number": ("3:\n  a: 1\n", "c.yaml:1: 3: unknown key"),
    "key that is a list": ("? [a, b]\n: 1\n", "c.yaml:1: a key should be a word"),
    "key with a line break": ('"a\\nb": 1\n', "c.yaml:1: a\\nb: unknown key"),
    "wrong type": ("train:\n  global_batch: many\n", ("c.yaml:2: train.global_batch: should be", "integer", "'many'")),
    "fraction": ("train:\n  global_batch: 1.5\n", ("c.yaml:2: train.global_batch: ", "1.5")),
    "yes as a number": ("train:\n  global_batch: yes\n", "c.yaml:2: train.global_batch: should be a number"),
    "yes as a fraction": ("train:\n  epochs: on\n", "c.yaml:2: train.epochs: should be a number"),
    "nothing as a number": ("optim:\n  lr:\n", ("c.yaml:2: optim.lr: should be a valid number", "null")),
    "number as text": ("run:\n  name: 123\n", ("c.yaml:2: run.name: should be text", "quotes", "123")),
    "text as a list": ("observe:\n  sinks: jsonl\n", ("c.yaml:2: observe.sinks: should be a list", "'jsonl'")),
    "number as a path": ("run:\n  dir: 3\n", "c.yaml:2: run.dir: should be the path"),
    "section that is a number": ("train: 3\n", "c.yaml:1: train: should be a section with keys of its own"),
    "section that is a name": ("data: digits\n", "c.yaml:1: data: should be a section with keys of its own"),
    "list in a section": ("data: [digits]\n", "c.yaml:1: data: should be a section with keys of its own"),
    "wrong literal": (
        "schedule:\n  shape: cosin\n",
        ("c.yaml:2: schedule.shape: ", "'one_cycle' or 'user'", "did you mean 'cosine'?"),
    ),
    "literal in capitals": ("train:\n  precision: BF16\n", ("c.yaml:2: train.precision: ", "did you mean 'bf16'?")),
    "either of two": ("launch:\n  processes: atuo\n", ("c.yaml:2: launch.processes: ", "integer", "or", "'auto'")),
    "neither of two": ("launch:\n  processes: 0\n", ("c.yaml:2: launch.processes: ", "greater than or equal to 1")),
    "below the range": ("optim:\n  lr: -1\n", ("c.yaml:2: optim.lr: should be greater than 0", "-1")),
    "above the range": ("optim:\n  momentum: 1\n", "c.yaml:2: optim.momentum: should be less than 1"),
    "not a number": ("optim:\n  lr: .nan\n", "c.yaml:2: optim.lr: should be a finite number"),
    "infinite": ("optim:\n  lr: 1e999\n", "c.yaml:2: optim.lr: should be a finite number"),
    "duplicate key": ("train:\n  epochs: 1\n\n  epochs: 2\n", ("c.yaml:4: train.epochs is given twice", "c.yaml:2")),
    "duplicate section": ("train:\n\ntrain:\n", ("c.yaml:3: train is given twice", "c.yaml:1")),
    "bracket left open": ("train:\n  epochs: [1\nrun:\n", ("c.yaml:3: this is not YAML", "flow sequence of line 2")),
    "quote left open": ("a: 1\nb: 'x\n\n", ("c.yaml:4: this is not YAML", "quoted scalar of line 2")),
    "tab": ("train:\n\tepochs: 1\n", "c.yaml:2: this is not YAML"),
    "indented askew": ("train:\n  epochs: 1\n bad: 2\n", "c.yaml:3: this is not YAML"),
    "two documents": ("train:\n---\ntrain:\n", "c.yaml:2: this is not YAML"),
    "Python object": ("train:\n  epochs: !!python/name:os.system\n", "c.yaml:2: train.epochs: the tag"),
    "zero byte": ("run:\n  name: \x00\n", "c.yaml:2: this is not YAML"),
    "half a number": ("run:\ntrain:\n  epochs: 0x_\n", ("c.yaml:3: train.epochs: ", "'0x_'")),
    "no such truth": ("train:\n  epochs: !!bool maybe\n", ("c.yaml:2: train.epochs: ", "'maybe'")),
    "anchor in itself": ("train: &a\n  epochs: *a\n", "c.yaml:1: train.epochs: this is nested too deep"),
    "list": ("- 1\n", "c.yaml: a config is made of sections"),
    "text": ("hello\n", ("c.yaml: a config is made of sections", "'hello'")),
    "long value": (f"optim:\n  lr: {'x' * 500}\n", ("c.yaml:2: optim.lr: ", "xxx...")),
    "unknown sink": ("observe:\n  sinks: [progres]\n", ("c.yaml:2: observe.sinks: ", "did you mean 'progress'?")),
    "file missing": (
        "data:\n  kind: files\n",
        ("c.yaml:1: data.train: is missing, but data.kind=files", "Training data: "),
    ),
    "model file missing": ("model:\n  kind: user\n", "c.yaml:1: model.file: is missing, but model.kind=user needs it"),
    "column missing": ("data:\n  kind: hub\n  name: x\n", ("c.yaml:1: data: ", "exactly one of text_column")),
    "list too short": (
        "data:\n  kind: hub\n  name: x\n  image_column: i\n  image_size: [8]\n",
        "c.yaml:5: data.image_size",
    ),
    "kind without a name": ("data:\n  kind:\n", ("c.yaml:2: data.kind: there is no ''", "digits")),
    "kind that is a number": ("data:\n  kind: 3\n", "c.yaml:2: data.kind: there is no '3'"),
    "three at once": (
        "data:\n  kind: digit\nmdoel:\n  kind: cnn\ntrain:\n  epochs: -1\n",
        ("c.yaml:2: data.kind: there is no 'digit'", "did you mean 'digits'?"),
        ("c.yaml:6: train.epochs: should be greater than 0",),
        ("c.yaml:3: mdoel: unknown key", "'model'?"),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistake_in_a_file_is_told_with_its_place(case):
    text, *expected = WRONG[case]
    assert_said(complaints(text), *expected)


@pytest.mark.parametrize(
    ("section", "wrong", "right"),
    [("data", "digit", "digits"), ("model", "CNN", "cnn"), ("parallel", "dpp", "ddp"), ("launch", "locale", "local")],
)
def test_unknown_kind_is_told_with_the_nearest_name(section, wrong, right):
    said = f"{section}.kind: there is no {wrong!r} — did you mean {right!r}? (there is: "
    assert_said(complaints(f"\n{section}:\n  kind: {wrong}\n"), f"c.yaml:3: {said}")
    assert_said(complaints(f"{section}:\n", f"{section}.kind={wrong}"), f"command line: {said}")


TEXTS, SINGLE = "data: {kind: files, train: a.csv}\n", "parallel:\n  kind: single\n"
IMPOSSIBLE = {
    "batch": ("", "train:\n  micro_batch: 9\n  global_batch: 8", "micro_batch: 9 is more than train.global_batch, and"),
    "epochs": ("", "train:\n  steps: 3\n  epochs: 1", "steps: give train.steps or train.epochs, not both"),
    "images": ("", "model:\n  kind: transformer", "kind: transformer takes texts, but data.kind=digits gives images"),
    "texts": (TEXTS, "model:\n  kind: cnn", "kind: cnn takes images, but data.kind=files gives texts"),
    "single": (SINGLE, "launch:\n  processes: 2", "processes: 2 processes, but parallel.kind=single runs one"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_combination_is_told_with_its_place(case):
    before, wrong, what = IMPOSSIBLE[case]
    section, *keys = wrong.split("\n")
    said = f"{section} {what}".replace(": ", ".", 1)
    assert_said(complaints(f"{before}{wrong}\n"), f"c.yaml:{before.count(chr(10)) + 2}: {said}")
    overrides = [f"{section[:-1]}.{key.strip().replace(': ', '=')}" for key in keys]
    assert_said(complaints(before, *overrides), f"command line: {said}")


@pytest.mark.parametrize("name", ["#x", "a #b"])
def test_an_override_has_no_comments(name):
    (line,) = complaints("", f"run.name={name}")
    assert f"(value {name!r})" in line


def test_every_contradiction_is_told_at_once():
    lines = complaints("train:\n  micro_batch: 99\n  epochs: 1\n  steps: 1\nmodel:\n  kind: transformer\n")
    assert [line.split(": ")[:2] for line in lines] == [
        ["c.yaml:2", "train.micro_batch"],
        ["c.yaml:4", "train.steps"],
        ["c.yaml:6", "model.kind"],
    ]


@pytest.mark.parametrize("text", ["", "# none\n", "---\n", "train:\n", "run: {}\n", "data:\nmodel:\nlaunch:\n"])
def test_empty_means_all_defaults(text):
    assert parse(text) == Recipe()


@pytest.mark.parametrize("text", ["\ufefftrain:\n  epochs: 3\n", "train:\r\n  epochs: 3\r\n", "{train: {epochs: 3}}"])
def test_files_of_other_editors_are_read(text):
    assert parse(text).train.epochs == 3


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", ".1e-2", "1.0e-3", "0.001", "+1e-3", "1_0e-4"])
def test_numbers_as_people_write_them(number):
    text = f"optim:\n  lr: {number}\ndata:\n  kind: user\n  file: a.py\n  options:\n    rate: {number}\n"
    recipe = parse(text, f"observe.options.rate={number}")
    assert recipe.optim.lr == recipe.data.options["rate"] == recipe.observe.options["rate"] == pytest.approx(1e-3)


@pytest.mark.parametrize("text", ["1e", "e5", "v1e3", "1e3.5", "'1e3'", "'007'", "a-1"])
def test_text_stays_text(text):
    assert parse(f"run:\n  name: {text}\n").run.name == text.strip("'")


@pytest.mark.parametrize(
    ("override", "found", "value"),
    [
        ("optim.lr=1e-3", lambda r: r.optim.lr, 0.001),
        ("data.limit=1e3", lambda r: r.data.limit, 1000),
        ("observe.sinks=[jsonl]", lambda r: r.observe.sinks, ("jsonl",)),
        ("observe.sinks=[]", lambda r: r.observe.sinks, ()),
        ("train.epochs=null", lambda r: r.train.epochs, None),
        ("train.epochs=", lambda r: r.train.epochs, None),
        ("train=null", lambda r: r.train.epochs, None),
        ("train={epochs: 5}", lambda r: r.train.epochs, 5),
        ("optim.clip=", lambda r: r.optim.clip, None),
        ("observe.options.a.b=c=d", lambda r: r.observe.options, {"a": {"b": "c=d"}, "kept": 1}),
        ("observe.options.kept=[1, {x: y}]", lambda r: r.observe.options, {"kept": [1, {"x": "y"}]}),
        ("observe.options={a: 1}", lambda r: r.observe.options, {"a": 1}),
        ("run.name='12'", lambda r: r.run.name, "12"),
        ("observe.options.a=a b", lambda r: r.observe.options.get("a"), "a b"),
        ("data.kind=mnist", lambda r: r.data.kind, "mnist"),
    ],
)
def test_override_wins_over_the_file(override, found, value):
    text = "train:\n  epochs: 2\noptim:\n  lr: 9\nobserve:\n  options:\n    kept: 1\n"
    assert found(parse(text)) != value
    assert found(parse(text, override)) == value


def test_last_override_wins():
    assert parse("", "train.epochs=3", "train.epochs=4").train.epochs == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        *[(text, ("command line: ", repr(text), "section.key=value")) for text in ("train.epochs", "=3", "a.=3", "")],
        ("trian.epochs=3", ("command line: trian: unknown key", "'train'?")),
        ("train.epoch=3", ("command line: train.epoch: unknown key", "'epochs'?")),
        ("train.lr=3", ("command line: train.lr: ", "did you mean optim.lr?")),
        ("train=3", "command line: train: should be a section"),
        ("data=digits", "command line: data: should be a section"),
        ("train.epochs=[1", ("command line: train.epochs: ", "'[1'")),
        ("train.epochs.x=3", "command line: train.epochs: should be a valid number"),
        ("train={epoch: 1}", ("command line: train.epoch: unknown key", "'epochs'?")),
        ("train={epochs: x}", "command line: train.epochs: should be a valid number"),
        ("train={epochs: 1, epochs: 2}", "command line: train.epochs is given twice"),
        ("train.epochs=&a [*a]", "command line: train.epochs: "),
        ("data.kind=files", "command line: data.train: is missing, but data.kind=files needs it"),
        ("data.limit=0", "command line: data.limit: should be greater than or equal to 1"),
    ],
)
def test_mistake_on_the_command_line_says_so(override, expected):
    text = "data:\ntrain:\n  epochs: 3\n"
    parse(text)
    assert_said(complaints(text, override), expected)


def test_kind_switched_on_the_command_line_meets_keys_of_the_file():
    text = "data:\n  kind: mnist\n  root: x\n"
    assert parse(text, "data.kind=ag_news", "model={kind: user, file: m.py}").data.root.name == "x"
    expected = "c.yaml:3: data.root: unknown key", "known for data.kind=digits: kind, limit"
    assert_said(complaints(text, "data.kind=digits"), expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "there is no file {}; `lockstep init` writes one"),
        (lambda path: path.mkdir(), "{} is a folder: name the YAML file"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n\0"), "{} is not a YAML file: byte 0 is not UTF-8 text"),
        (lambda path: path.write_bytes("train:\n".encode("utf-16")), "{} is not a YAML file: byte 0 is not UTF-8 text"),
        (lambda path: path.symlink_to(path), "cannot read {}: Too many levels of symbolic links"),
    ],
    ids=["missing", "folder", "picture", "utf-16", "link to itself"],
)
def test_file_that_cannot_be_read(tmp_path, make, said):
    path = tmp_path / "c.yaml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert_said(str(caught.value).split("\n"), said.format(path))


@pytest.mark.parametrize("recipe", [*CONFIGS, *plugins.names("data.sources")], ids=lambda r: pathlib.Path(r).name)
def test_dump_loads_to_an_equal_recipe(tmp_path, recipe):
    recipe = load(recipe) if isinstance(recipe, pathlib.Path) else starter(recipe)
    (tmp_path / "again.yaml").write_text(config.dump(recipe), encoding="utf-8")
    again = load(tmp_path / "again.yaml")
    assert again == recipe
    assert config.dump(again) == config.dump(recipe)
    assert again != load(tmp_path / "again.yaml", ["run.seed=1"])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=3), st.sampled_from(["1e-3", "2024-01-01", "=", "<<", "007", "~"]))
def test_dump_keeps_any_options(options, name):
    options |= {"tricky": name, name: 1e-5}
    recipe = Recipe.model_validate(
        {"observe": {"options": options}, "model": {"kind": "user", "file": "m.py"}, "checkpoint": {"best": name}}
    )
    assert parse(config.dump(recipe)) == recipe


PIECES = [
    *"abc 13:-[]{},&*!|>'\"#%@\n\t\0\u2028",
    "\n  ",
    "train",
    "data",
    ": ",
    "kind",
    "epochs",
    "<<",
    "!!int",
    "- ",
    "e5",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.booleans())
def test_nothing_typed_ends_in_a_traceback(text, in_file):
    """Whatever is typed loads, or is complained about with one line each that begins with the place."""
    try:
        parse(text) if in_file else parse("", text)
    except ConfigError as error:
        place = r"c\.yaml(:\d+)?: " if in_file else "command line(:1)?: "
        assert all(re.match(place, line) for line in str(error).split("\n")), str(error)


@pytest.mark.parametrize("name", [*Recipe.model_fields, *(".".join(plugin) for plugin in PLUGINS)])
def test_every_setting_is_described(name):
    if name in Recipe.model_fields:
        section = type(getattr(Recipe(), name))
    else:
        section = importlib.import_module(f"lockstep.{name}").Config
        assert issubclass(section, config.PluginSection)
    assert "__doc__" in vars(section) and section.__doc__.strip()
    assert not [key for key, field in section.model_fields.items() if not (field.description or "").strip()]
    assert section.model_config["frozen"] and section.model_config["extra"] == "forbid"


def test_nearest_ignores_case_and_invents_nothing():
    assert nearest("MNIST", ["digits", "mnist"]) == " — did you mean 'mnist'?"
    assert nearest("wholly", ["digits", "mnist"]) == ""


def test_file_that_fails_is_not_found_half_loaded(tmp_path):
    file = tmp_path / "my_broken_model.py"
    file.write_text("half = True\nraise ZeroDivisionError\n")
    with pytest.raises(UntrustedCode):  # whoever calls it, nobody has asked
        plugins.load_file(file, "model.file")
    trust.own(trust.code_with_imports(file))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            plugins.load_file(file, "model.file")
    file.write_text("whole = True\n")
    assert plugins.load_file(file, "model.file").whole
    with pytest.raises(ConfigError, match="there is no file"):
        plugins.load_file(tmp_path, "model.file")


def test_runs_lie_where_the_program_is_when_it_loads_a_config(tmp_path, monkeypatch):
    """Not where it was when it imported Lockstep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\n")
    assert load(tmp_path / "c.yaml").run.dir == tmp_path / "runs"
