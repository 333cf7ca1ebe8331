"""Folders of the repository, and where real data is."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTS = ROOT / "tests"
SUPPORT = pathlib.Path(__file__).parent
OWN = SUPPORT / "own"
"""Files of users."""
DATA = pathlib.Path(os.environ.get("LOCKSTEP_TEST_DATA", pathlib.Path(__file__).parents[3] / "shared" / "data"))
"""Where real MNIST and AG News are, if they are at hand."""
GPU_TESTS_ON = os.environ.get("LOCKSTEP_TEST_DEVICE", "cuda")
"""cpu: a trial of the tests marked `gpu`, which says nothing of a GPU."""
