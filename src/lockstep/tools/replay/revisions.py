"""`lockstep bisect` for one config at two revisions of a git repository, each with the code of its own worktree."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from lockstep.base import config
from lockstep.base.errors import ConfigError
from lockstep.protocol import environment
from lockstep.recipe import recipe as recipes
from lockstep.recipe import recipe_trust
from lockstep.recipe.recipe import Recipe
from lockstep.tools import trials
from lockstep.tools.compare.run_evidence import Evidence, evidence
from lockstep.tools.replay.bisecting import bisect
from lockstep.tools.replay.replaying import LoggedRun, ReplayRequest

TASK = Path("src/lockstep/run/tasks/replay.py")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder -> what it prints. Raises ConfigError."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("--revisions needs git, which is not installed here") from None
    if done.returncode:
        raise ConfigError(f"git {arguments[0]}: {done.stderr.strip() or 'failed'}")
    return done.stdout.strip("\n")


@dataclass(frozen=True, kw_only=True)
class Repository:
    root: Path
    file: Path
    """The config, seen from the root."""
    working: Path
    """The folder from which the config's paths count, seen from the root."""

    @classmethod
    def of(cls, path: Path) -> "Repository":
        """Find the repository of a config. Raises ConfigError."""
        if not path.is_file():
            raise ConfigError(f"{path} is no config: there is no such file (--revisions compares two of a config's)")
        file, here = path.absolute().parent.resolve() / path.name, Path.cwd().resolve()
        try:
            root = Path(git(file.parent, "rev-parse", "--show-toplevel"))
        except ConfigError as error:
            what = f"{path} is in no git repository ({error})"
            raise ConfigError(f"{what}; to compare two runs: lockstep bisect RUN_A RUN_B") from None
        if not here.is_relative_to(root):
            raise ConfigError(f"a config's paths count from the working folder: change into {root} first (cd)")
        return cls(root=root, file=file.relative_to(root), working=here.relative_to(root))

    def commit(self, revision: str) -> str:
        """Return the commit of a revision that has the config. Raises ConfigError."""
        try:
            commit = git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except ConfigError:
            what = f"there is no revision {revision!r} in {self.root}"
            raise ConfigError(f"{what}; name a commit, a branch or a tag, such as HEAD~1") from None
        with suppress(ConfigError):
            git(self.root, "cat-file", "-e", f"{commit}:{self.file.as_posix()}")
            return commit
        raise ConfigError(f"{self.file} is not in revision {revision}: name one that has it, or commit it there")

    @contextmanager
    def checked_out(self, commit: str, folder: Path) -> Iterator[Sequence[Path]]:
        """Check a commit out into a new folder -> the folders in it from which modules are imported. What git does not
        track, such as data, is linked. It is removed afterwards."""
        try:
            git(self.root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(folder), commit)
            if (folder / TASK.parents[2]).is_dir() and not (folder / TASK).is_file():
                raise ConfigError(f"revision {commit[:10]} of Lockstep is older than `lockstep bisect`")
            if not (folder / self.working).is_dir():
                raise ConfigError(f"revision {commit[:10]} has no folder {self.working}: change into {self.root} (cd)")
            known = [Path(each).resolve() for each in sys.path if each]
            own = [folder / each.relative_to(self.root) for each in known if each.is_relative_to(self.root)]
            modules = [each for each in dict.fromkeys([folder / "src", *own]) if each.is_dir()]
            self._link_untracked(folder)
            yield modules
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # which follows no link
            with suppress(ConfigError):
                git(self.root, "worktree", "remove", "--force", "--force", str(folder))

    def _link_untracked(self, folder: Path) -> None:
        for name in git(self.root, "ls-files", "--others", "--directory", "-z").split("\0"):
            link = folder / name
            is_code = name.rstrip("/").endswith("__pycache__")  # of another revision's files
            if name and not is_code and link.parent.is_dir() and not os.path.lexists(link):
                link.symlink_to(self.root / name)


@contextmanager
def placed(recipe: Recipe, folder: Path, modules: Sequence[Path]) -> Iterator[None]:
    """Start trials in a folder, with these modules: where Lockstep is one, as new interpreters, not as forks."""
    is_own = any((each / "lockstep").is_dir() for each in modules)
    forking = nullcontext() if is_own else trials.forking(recipe, "replay")
    with chdir(folder), environment.importing_from(modules), forking:
        yield


def compare(path: Path, revisions: Sequence[str], *, steps: int, trusts: bool, console: Console) -> int:
    """Train the first steps of a config at both revisions, and find where they part; return 0 if nowhere, else 1.
    Raises ConfigError, UntrustedCode, TrialFailed."""
    repository = Repository.of(path)
    commits, report = [repository.commit(each) for each in revisions], trials.timed_lines(console)
    with trials.temporary_folder("lockstep-revisions-") as outer, ExitStack() as stack:
        runs = list[LoggedRun]()
        for name, revision, commit in zip("AB", revisions, commits, strict=True):
            folder = outer.resolve() / name
            modules = stack.enter_context(repository.checked_out(commit, folder))
            with chdir(folder / repository.working):
                text = config.dump(recipes.load(folder / repository.file))
            moved = text.replace(f"{repository.root}{os.sep}", f"{folder}{os.sep}")
            recipe = recipes.parse(moved, file=str(repository.file))
            recipe_trust.authorize(recipe, repository.root / repository.file, trusts=trusts)
            log = Evidence(name=f"revision {revision}", facts={}, checkpoints={}, numeric={}, settings={})
            place = partial(placed, recipe, folder / repository.working, modules)
            run = LoggedRun(recipe=recipe, folder=outer / f"run-{name}", log=log, trusts=True, placed=place)
            report(f"{name}: training {steps} steps of {log.name} ({commit[:10]}) ...")
            request = ReplayRequest(first=steps, last=steps, until=steps, opens=False)
            run.again(request, run.folder, report).checked()
            runs.append(replace(run, log=replace(evidence(run.folder), name=log.name)))
        return bisect(runs, console, hidden=f"{outer.resolve() / 'A'}{os.sep}")
