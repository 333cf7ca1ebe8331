"""Puts lessons/ and examples/, which lie beside the package for readers, into the wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithShipped(build_py):
    """Copies them to lockstep/."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for file in (*Path("lessons").glob("*.py"), *Path("examples").glob("*.yaml")):
                target = Path(self.build_lib) / "lockstep" / file
                self.mkpath(str(target.parent))
                self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": WithShipped})
