"""`lockstep init`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lockstep.base import config, storage, templates
from lockstep.base.errors import ConfigError, nearest
from lockstep.cli._common import console, shipped_folder

EXAMPLES = "examples/"
"""Prefix of the name of a config that is ready to run, as opposed to one with every setting explained."""
WORKFLOW = Path(".github", "workflows", "gate.yml")


def command(
    task: Annotated[str, typer.Argument(help="What to train, one of --list; gate: a workflow for CI.")] = "digits",
    to: Annotated[Path | None, typer.Option(help="File to write; default: TASK.yaml.")] = None,
    lists: Annotated[bool, typer.Option("--list", help="List the tasks, and write nothing.")] = False,
) -> None:
    """Write a commented config to start from; for `user` also a Python file with data and a model, beside it.

    `examples/NAME` writes a short config that is ready to run, `gate` a GitHub workflow that runs lockstep gate.
    """
    if lists:
        _show_tasks()
        return
    if task.startswith(EXAMPLES):
        _copy_example(task.removeprefix(EXAMPLES), to)
        return
    if task == "gate":
        if to is None:
            WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
        _write((to or WORKFLOW).parent, {to or WORKFLOW: templates.render("cli/gate_workflow.yml.j2")})
        console.print(f"wrote {to or WORKFLOW}; next: lockstep gate CONFIG --record golden.json", soft_wrap=True)
        return
    from lockstep.recipe import recipe as recipes

    target = to or Path(f"{task}.yaml")
    code = target.with_suffix(".py")
    template = recipes.template(task)
    text = config.explain(recipes.with_auto(recipes.starter(task, code)))
    train = f"lockstep train {target}"
    written = {target: f"# {train}\n\n{text}"}
    if template is not None:
        if code == target:
            raise ConfigError(f"{target} would be the Python file as well: name a YAML file with --to")
        written = {code: template.read_text(encoding="utf-8"), **written}
    _write(target.parent, written)
    names = " and ".join(str(file) for file in reversed(written))
    console.print(f"wrote {names}; next: {train}", soft_wrap=True)


def _copy_example(name: str, to: Path | None) -> None:
    examples = _examples()
    if name not in examples:
        hint = nearest(name, list(examples)) or f": there are {', '.join(examples)}"
        raise ConfigError(f"there is no example {name!r}{hint}")
    target = to or Path(f"{name}.yaml")
    text = examples[name].read_text(encoding="utf-8")
    _write(target.parent, {target: text.replace(f"examples/{name}.yaml", str(target))})
    console.print(f"wrote {target}; next: lockstep train {target}", soft_wrap=True)


def _examples() -> dict[str, Path]:
    return {file.stem: file for file in sorted(shipped_folder("examples").glob("*.yaml"))}


def _write(folder: Path, written: dict[Path, str]) -> None:
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: make it, or name another file with --to")
    for file in written:
        if file.exists() or file.is_symlink():
            raise ConfigError(f"{file} exists and is not overwritten; name another file with --to")
    for file, content in written.items():
        try:
            storage.write(file, content)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}; name another file with --to") from None


def _show_tasks() -> None:
    from lockstep.recipe import recipe as recipes

    table = Table("task", "what it is", "model")
    for name in recipes.tasks():
        section = recipes.starter(name)
        described = type(section.model if name == section.model.kind else section.data)
        table.add_row(name, (described.__doc__ or "").splitlines()[0], section.model.kind)
    for name, file in _examples().items():
        about = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        table.add_row(EXAMPLES + name, about, recipes.load(file, []).model.kind)
    console.print(table)
