"""The house stands: imports go down only, rooms on one floor are strangers, and nothing hides from the count."""

import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1] / "src" / "lockstep"
FLOORS = [
    ["errors"],
    ["yaml_text", "escaping", "ctrl_c", "output"],
    ["user_code"],
    ["trust"],
    ["events", "config", "plugins", "world", "files", "terminal"],
    ["contracts"],
    ["agent"],
    ["runtime", "launch"],
    ["data", "models", "parallel", "optim", "checkpoint", "observe", "diagnose", "metrics"],
    ["training", "evaluation", "export", "compare"],
    ["inference"],
    ["serving"],
    ["recipe"],
    ["assembly", "runs"],
    ["using"],
    ["job"],
    ["worker", "launching"],
    ["prove", "tune", "estimate", "evaluate", "predict", "jobs", "notebook"],
    ["cli_trained"],
    ["cli"],
    ["__main__"],
]
FAMILIES = ["models", "export/formats", "data/sources", "parallel", "launch", "observe/sinks", "estimate/strategies"]
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
                yield inner if inner in MODULES else inner.rpartition(".")[0]


def test_every_room_has_a_floor():
    assert {m.split(".")[0] for m in MODULES} == set(FLOOR_OF)


def test_imports_only_go_down():
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        if here.split(".")[0] != there.split(".")[0] and FLOOR_OF[there.split(".")[0]] >= FLOOR_OF[here.split(".")[0]]
    ]
    assert not wrong, wrong


def test_plugins_do_not_know_each_other():
    wrong = [
        f"{here} -> {there}"
        for here, path in MODULES.items()
        for there in imported(path)
        for family in FAMILIES
        if here.startswith(f"{family.replace('/', '.')}.") and there.startswith(f"{family.replace('/', '.')}.")
        if not there.rpartition(".")[2].startswith("_")  # what all of a family share
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


def test_only_the_plugin_finder_imports_by_name():
    assert [m for m, p in MODULES.items() if re.search(r"importlib(?!\.metadata)", p.read_text())] == ["plugins"]
