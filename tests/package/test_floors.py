"""The house stands: imports go down only, rooms on one floor are strangers, and nothing hides from the count."""

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
    ["base.errors", "base.contracts", "base.socket_folder", "base.loading_line"],
    ["base.storage"],
    ["base.yaml_text", "base.escaping_console", "base.ctrl_c", "base.closed_output"],
    ["base.user_code"],
    ["base.trust"],
    ["base"],
    ["base.model_contracts"],
    ["launch.launch_config"],
    ["launch.elastic"],
    ["core", "launch.launchers", "training.optim_config"],
    ["training.metrics", "training.learning_rate", "training.optimizer_memory"],
    ["models.objectives"],
    ["data", "models", "checkpoint", "observe", "training.optim"],
    ["parallel"],
    ["training", "inference.export", "tools.compare"],
    ["inference.predictor"],
    ["inference.generation"],
    ["inference.serving"],
    ["run.recipe"],
    ["run.splits", "run.recipe_trust"],
    ["launch.run_folder", "launch.recovery"],
    ["run.warm_start"],
    ["run.components"],
    ["run.build", "run.user_code_checks", "run.text_samples", "run.training_summary"],
    ["inference.trained_model"],
    ["run.tasks._task"],
    ["run.tasks.train"],
    ["run", "launch.launch_run"],
    ["launch.run_control"],
    ["tools", "inference", "launch"],
    ["run.api"],
    ["run.tasks", "tools.teaching"],
    ["cli._common"],
    ["cli"],
    ["__main__"],
]
"""From the ground up: modules, or rooms with all that is in them but for what is named by itself."""
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
MOST_ENTRIES, MOST_LINES = 16, 400
PLUGIN_CLASSES = ("Config", "Note")
"""What every plugin of a family has, by one name."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
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


def room_of(module):
    """The longest part of its name that has a floor."""
    parts = module.split(".")
    return next((room for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in FLOOR_OF), None)


def test_every_module_has_a_floor():
    assert [module for module in MODULES if room_of(module) is None] == []
    assert set(map(room_of, MODULES)) == set(FLOOR_OF)


def test_the_listing_reads_as_a_sentence():
    entries = [path.name for path in ROOT.iterdir() if path.is_file() or any(path.rglob("*.py"))]
    assert len(entries) <= MOST_ENTRIES, entries


def test_imports_only_go_down():
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        if room_of(here) != room_of(there) and FLOOR_OF[room_of(there)] >= FLOOR_OF[room_of(here)]
    ]
    assert wrong == []


def test_plugins_do_not_know_each_other():
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        for family in FAMILIES
        if here.startswith(f"{family.replace('/', '.')}.") and there.startswith(f"{family.replace('/', '.')}.")
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
    assert by_name == {"base.plugins", "launch.elastic.fork_server", "core.host.deferred_dynamo"}


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
    """Files, and classes; but plugins, commands and tasks are called as people type them, in their own folders."""
    files = collections.Counter(module.rpartition(".")[2] for module in MODULES if not is_typed(module))
    classes = collections.Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name not in PLUGIN_CLASSES
    )
    assert [name for name, count in (files + classes).items() if count > 1] == []


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
