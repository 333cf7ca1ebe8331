"""Puts lessons/, which lie beside the package for readers, into the wheel; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithLessons(build_py):
    """Copies them to lockstep/lessons."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "lockstep" / "lessons"
            self.mkpath(str(target))
            for file in Path("lessons").glob("*.py"):
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": WithLessons})
