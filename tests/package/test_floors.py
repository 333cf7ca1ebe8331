"""Imports go down the floors only, folders on one floor do not import each other, and nothing hides from the count."""

import ast
import collections
import re
import subprocess
import sys

import pytest
from places import EXAMPLES, TESTS
from places import ROOT as REPOSITORY

from lockstep.base import plugins
from lockstep.base.contracts import HOOKS

ROOT = REPOSITORY / "src" / "lockstep"
FLOORS = [
    ["base"],
    ["protocol"],
    ["core"],
    ["checkpoint", "data", "observe"],
    ["models", "parallel"],
    ["training"],
    ["recipe"],
    ["launch", "loop"],
    ["inference"],
    ["tools"],
    ["run"],
    ["cli", "testing"],
]
"""Folders from the ground up: a module imports from its own folder and from those of lower floors."""
FAMILIES = [
    "models",
    "models/objectives",
    "inference/export/formats",
    "data/sources",
    "parallel/strategies",
    "launch/launchers",
]
FAMILIES += ["observe/sinks", "cli"]
STRATEGIES, LAUNCHERS = (plugins.names(family) for family in ("parallel.strategies", "launch.launchers"))
MOST_FLOORS, MOST_ENTRIES, MOST_LINES = 12, 20, 400
PLUGIN_CLASSES = ("Config", "Note")
"""What every plugin of a family has, by one name."""
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py") if p.stem != "__init__"}


def imported(path):
    """Every sibling module named anywhere in a file: at the top, in a function, or under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{a.name}" for a in node.names]
        for name in names:
            if name.split(".")[0] == ROOT.name:
                inner = name.split(".", 1)[1]
                if "." in inner:  # else what the root offers
                    yield inner if inner in MODULES else inner.rpartition(".")[0]


def folder_of(module):
    return module.split(".")[0]


def test_every_folder_has_a_floor():
    assert {folder_of(module) for module in MODULES} - {"__main__"} == set(FLOOR_OF)
    assert len(FLOORS) <= MOST_FLOORS


def test_the_listing_reads_as_a_sentence():
    entries = [path.name for path in ROOT.iterdir() if path.is_file() or any(path.rglob("*.py"))]
    assert len(entries) <= MOST_ENTRIES, entries


def test_imports_only_go_down():
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        if here != "__main__" and folder_of(here) != folder_of(there)
        if FLOOR_OF[folder_of(there)] >= FLOOR_OF[folder_of(here)]
    ]
    assert wrong == []


def test_plugins_do_not_know_each_other():
    folders = {family.replace("/", ".") for family in FAMILIES}
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        if {here.rpartition(".")[0], there.rpartition(".")[0]} <= folders
        if not there.rpartition(".")[2].startswith("_")  # what all of a family share
        if here.rpartition(".")[2] != f"_{there.rpartition('.')[2]}"  # what a plugin keeps beside it
    ]
    assert not wrong, wrong


def test_package_doors_are_empty():
    """But for the root's, which offers what is called from Python."""
    assert all(not p.read_text().strip() for p in ROOT.rglob("__init__.py") if p.parent != ROOT)


def test_the_root_door_is_cheap():
    """It imports nothing, and above all no torch, before something is asked of it."""
    script = "import sys, lockstep; print(sorted(m for m in sys.modules if m.startswith(('lockstep', 'torch'))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "['lockstep']\n"


def test_no_circles():
    graph = {here: set(imported(path)) for here, path in MODULES.items()}
    done = set()

    def visit(module, path):
        assert module not in path, [*path[path.index(module) :], module]
        if module not in done:
            for there in graph.get(module, ()):
                visit(there, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_hardly_anything_imports_by_name():
    """The plugin finder, and what imports ahead of workers or stands for a module that is imported later."""
    by_name = {m for m, p in MODULES.items() if re.search(r"importlib(?!\.metadata)", p.read_text())}
    assert by_name == {"base.plugins", "launch.elastic.fork_server", "core.host.deferred_imports"}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], ["train", "--help"], ["train", "nothing.yaml"]]
    + [[name, "nowhere"] for name in ("export", "serve", "evaluate", "status", "watch", "logs", "report", "trian")]
    + [["compare", "one", str(EXAMPLES)], ["predict", str(EXAMPLES), "in.csv", "--out", "out.csv"]]
    + [["train", str(EXAMPLES / name), "train.epoch=3"] for name in ("digits.yaml", "mnist.yaml", "ag_news.yaml")]
    + [["train", str(EXAMPLES / "digits.yaml"), f"parallel.kind={kind}", "run.dirr=x"] for kind in STRATEGIES]
    + [["train", str(EXAMPLES / "digits.yaml"), f"launch.kind={kind}", "run.dirr=x"] for kind in LAUNCHERS],
    ids=" ".join,
)
def test_help_and_mistakes_import_no_torch(words):
    """Which takes seconds."""
    script = f"""
import sys
from lockstep.cli import _app
try:
    _app.app({words})
finally:
    print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
    assert "Traceback" not in done.stderr


def test_a_name_stands_for_one_thing():
    """A file's name in its folder of the floors, and a class in the package; but plugins, commands and tasks are called
    as people type them, in their own folders."""
    files = collections.Counter(
        (folder_of(module), module.rpartition(".")[2]) for module in MODULES if not is_typed(module)
    )
    classes = collections.Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name not in PLUGIN_CLASSES
    )
    assert [name for each in (files, classes) for name, count in each.items() if count > 1] == []


def is_typed(module):
    return module.rpartition(".")[0].replace(".", "/") in [*FAMILIES, "run/tasks"]


def test_contracts_are_declared():
    """What a plugin may have is asked of its Config, or of plugins.hook(); a kind is not compared with a name."""
    names = "|".join(name for family in plugins.FAMILIES.values() for name in plugins.names(family))
    asked = re.compile(
        r"(getattr|hasattr)\((?!plugins\.load_file)(plugins?\b|own\b|(recipe\.(model|data|parallel|launch)|section), \")"
    )
    compared = re.compile(rf'(model|data|parallel|launch)\.kind (==|!=|in) \(?"({names})"')
    wrong = [
        f"{module}: {line.strip()}"
        for module, path in MODULES.items()
        for line in path.read_text().splitlines()
        if asked.search(line) or compared.search(line)
    ]
    assert wrong == []


def test_every_hook_is_somebodys():
    """A hook that no plugin has is no contract any more."""
    for family, hooks in HOOKS.items():
        found = {hook for name in plugins.names(family) for hook in hooks if plugins.hook(family, name, hook)}
        assert found == set(hooks)


def test_files_have_at_most_400_lines():
    assert {path.name for path in ROOT.rglob("*.py") if len(path.read_text().splitlines()) > MOST_LINES} == set()


def test_no_test_imports_another():
    """What several share is in tests/support."""
    wrong = [
        f"{path.name}: {node.module}"
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("test_", "conftest"))
    ]
    assert wrong == []
