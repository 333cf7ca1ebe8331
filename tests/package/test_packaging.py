"""What is installed: a wheel that trains by itself, no package that training does not need, and nothing undeclared."""

import ast
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name as canonical
from places import ROOT

PACKAGE = ROOT / "src" / "lockstep"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BY_OTHERS = {"httptools", "nvidia-ml-py", "onnxscript", "python-multipart", "s3fs", "tensorboard", "uvloop"}
"""What uvicorn, torch.cuda, torch.onnx, starlette, fsspec and torch.utils.tensorboard import."""
OF_OTHERS = {"markupsafe", "pydantic_core", "starlette"}
"""What jinja2, pydantic and fastapi are built on, and cannot be without."""
SHORT = [
    "train.epochs=null",
    "train.steps=3",
    "train.global_batch=16",
    "train.micro_batch=8",
    "data.limit=64",
    "run.name=a",
]
BLOCKED = """
import sys

class Without:
    #A finder that has never heard of some packages
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {modules} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from lockstep.cli import _app as cli
from lockstep.run import worker
sys.exit(worker.main(sys.argv[2:]) if sys.argv[1] == "worker" else cli.app(sys.argv[1:]))
"""
"""A Lockstep without the packages of its extras."""


def names(requirements):
    return {canonical(Requirement(text).name) for text in requirements}


def modules_of(distributions):
    """What can be imported from them."""
    return {module for module, owners in owners_of_modules().items() if names(owners) & distributions}


@cache
def owners_of_modules():
    return metadata.packages_distributions()


def imported():
    """Every foreign module that a file imports, at whatever place."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module


DECLARED = [
    *PROJECT["dependencies"],
    *(text for name, extra in EXTRAS.items() if name not in ("dev", "docs") for text in extra),
]


def test_what_is_declared_is_imported():
    tops = {module.partition(".")[0] for module in imported()}
    for name in names(DECLARED):
        assert tops & modules_of({name}) or name in BY_OTHERS, name


def test_what_is_imported_is_declared():
    known = modules_of(names(DECLARED)) | set(sys.stdlib_module_names) | {"lockstep", *OF_OTHERS}
    assert not sorted({module.partition(".")[0] for module in imported()} - known)


def test_torch_is_exact_in_the_constraints_alone():
    assert "torch>=2.11,<2.14" in PROJECT["dependencies"]
    assert not [text for text in PROJECT["dependencies"] if "==" in text]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()
    assert "2.13.0" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("torch", ["2.10.0", "2.14.0", "3.0", "2.1", "2.131"])
def test_setup_refuses_another_torch_in_one_line(tmp_path, torch):
    """Before it makes anything."""
    environment = os.environ | {"PYTHON": sys.executable, "TORCH": torch, "VENV": str(tmp_path / "venv")}
    done = subprocess.run([ROOT / "scripts" / "setup.sh"], env=environment, capture_output=True, text=True, timeout=30)
    said = f"Lockstep needs torch 2.11, 2.12 or 2.13, and TORCH is {torch}\n"
    assert (done.returncode, done.stdout, done.stderr, list(tmp_path.iterdir())) == (1, "", said, [])


def test_every_supported_version_is_tested():
    tested = (ROOT / ".ci" / "versions").read_text()
    named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(">=3.11,<3.14")
    assert named == ["3.11", "3.12", "3.13"] and all(f'"{version} 2.' in tested for version in named)
    assert all(f"2.{minor}.0" in tested for minor in (11, 12, 13))


def test_the_constraints_name_every_package():
    """All that is declared, and all that those need, at the versions that are tested with."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert lines == sorted(lines, key=str.lower)
    if pinned["torch"] != metadata.version("torch").partition("+")[0]:
        pytest.skip(f"constraints.txt is that of torch {pinned['torch']}")
    wanted = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    todo, done = [(text, ("",)) for text in wanted if not text.startswith("lockstep-train[")], set()
    while todo:
        text, extras = todo.pop()
        requirement = Requirement(text)
        name = canonical(requirement.name)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        if (name, frozenset(requirement.extras)) in done or name.startswith(("nvidia-", "cuda-", "triton")):  # for GPUs
            continue
        done.add((name, frozenset(requirement.extras)))
        assert pinned.get(name) == metadata.version(name).partition("+")[0], name
        todo += [(text, ("", *requirement.extras)) for text in metadata.requires(name) or []]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git has, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("lessons", "examples", "docs/man"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


PIP = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet"]


def test_a_wheel_holds_all_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = {name.removeprefix("lockstep/") for name in file.namelist() if name.startswith("lockstep/")}
        man = file.read(f"lockstep_train-{PROJECT['version']}.data/data/share/man/man1/lockstep.1").decode()
        about = file.read(f"lockstep_train-{PROJECT['version']}.dist-info/METADATA").decode()
        assert (
            file.read(f"lockstep_train-{PROJECT['version']}.dist-info/licenses/LICENSE")
            == (ROOT / "LICENSE").read_bytes()
        )
    ours = {
        p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    shipped = [*(ROOT / "lessons").glob("*.py"), *(ROOT / "examples").glob("*.yaml")]
    assert held == ours | {file.relative_to(ROOT).as_posix() for file in shipped}
    assert man == runpy.run_path(str(ROOT / "docs" / "_man_page.py"))["page"]()  # else: make docs
    assert {"py.typed", "inference/serving/page.html", "inference/evaluate/page.html"} <= held
    assert "License-Expression: Apache-2.0\n" in about
    always = [line for line in about.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert names(line.partition(": ")[2] for line in always) == names(PROJECT["dependencies"])
    assert not names(EXTRAS["serve"]) & names(PROJECT["dependencies"])


def test_a_wheel_trains_outside_of_the_repository(wheel, tmp_path):
    """On two processes, with nothing of the repository in reach."""
    target = tmp_path / "site"
    command = [*PIP, "install", "--no-index", "--no-deps", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    work = tmp_path / "work"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def python(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    where = "import lockstep; print(lockstep.__file__, lockstep.__version__)"
    assert python("-c", where) == f"{target}/lockstep/__init__.py {PROJECT['version']}"
    assert python("-m", "lockstep", "--version").startswith(
        f"lockstep {PROJECT['version']}, torch {metadata.version('torch')}"
    )
    assert "different process ids" in python("-m", "lockstep", "learn", "2", "--show")
    python("-m", "lockstep", "init", "digits")
    said = python("-m", "lockstep", "train", "digits.yaml", *SHORT, "launch.processes=2")
    assert "finished after 3 steps" in said
    assert "accuracy" in python("-m", "lockstep", "evaluate", "runs/a")
    assert "read back" in python("-m", "lockstep", "export", "runs/a")


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Runs a command where no package of an extra can be imported -> (exit code, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("without")
    modules = modules_of(names([*EXTRAS["serve"], *EXTRAS["onnx"], *EXTRAS["hub"]])) | {"starlette"}
    assert {"fastapi", "uvicorn", "datasets", "onnx"} <= modules
    (folder / "c.yaml").write_text("data: {kind: digits}\n")

    def run(*arguments):
        command = [sys.executable, "-c", BLOCKED.format(modules=modules), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run("worker", "c.yaml", *SHORT)
    assert (code, err) == (0, ""), out + err
    return run


@pytest.mark.parametrize(
    ("extra", "module", "arguments"),
    [
        ("serve", "fastapi", ["serve", "runs/a"]),
        ("onnx", "onnx", ["export", "runs/a", "export.kind=onnx"]),
        ("hub", "datasets", ["data", "c.yaml", "data.kind=hub", "data.name=a/b", "data.image_column=image"]),
    ],
)
def test_a_missing_extra_is_named_in_one_line(without, extra, module, arguments):
    """And training needs none of them."""
    code, out, err = without(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"pip install 'lockstep-train[{extra}]' (No module named '{module}')" in err


def test_the_version_is_told_without_torch():
    script = (
        "import sys; sys.argv = ['lockstep', '--version']; from lockstep.__main__ import main; main();"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    versions = f"torch {metadata.version('torch')}, Python {sys.version.split()[0]}\n"
    assert (done.returncode, done.stdout.partition(", ")[2]) == (0, versions), done.stderr
    slow = subprocess.run([sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, timeout=60)
    assert slow.stdout == done.stdout


def test_what_python_is_offered():
    import lockstep

    assert {"spawn", "__version__"} <= set(dir(lockstep))
    assert lockstep.__version__ == metadata.version("lockstep-train")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lockstep.nothing
