"""What lockstep.Loop compares of its data: between processes at the start, and with its checkpoints at a resume."""

import io
from contextlib import redirect_stderr

import numpy as np
import pytest
import torch
from own_loops import Points, trained

from lockstep.base.errors import LockstepError


class Signs(Points):
    """Two classes, numbered in an order of one's own."""

    def __init__(self, classes=("minus", "plus")):
        super().__init__()
        self.classes = list(classes)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.classes.index("plus" if self.x[index].sum() > 0 else "minus")}


class Unsteady(Signs):
    def __getitem__(self, index):
        return {"x": self.x[index] + 0.01 * torch.from_numpy(np.random.default_rng().normal(size=6)).float(), "y": 0}


def told(folder, dataset, **settings):
    try:
        return trained(folder, dataset=dataset, **settings)[0]
    except LockstepError as error:
        return str(error)


def told_by_rank(folder, classes):
    """As where each process numbers its classes in the order of a set."""
    return told(folder, Signs(classes[torch.distributed.get_rank()]))


def test_processes_with_other_data_are_told(ranks, tmp_path):
    one, other = ("minus", "plus"), ("plus", "minus")
    found = ranks(2, told_by_rank, tmp_path / "other", (one, other))
    assert all(text.startswith("rank 1 has other training samples than rank 0") for text in found), found
    alike = ranks(2, told_by_rank, tmp_path / "alike", (one, one))
    assert alike == ranks(1, told_by_rank, tmp_path / "one", (one,)) * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_sees_other_data(ranks, tmp_path, workers):
    folder, settings = tmp_path / "run", {"workers": workers, "save_steps": 1}
    ranks(2, until_four, folder, settings)
    (refused,) = ranks(1, changed, folder, settings)
    assert "data.contents: the training samples, their labels or their order have changed" in refused
    assert ranks(1, changed, folder, {**settings, "allow_drift": True})[0].isalnum()


def until_four(folder, settings):
    trained(folder, until=4, dataset=Signs(), **settings)


def changed(folder, settings):
    return told(folder, Signs(("plus", "minus")), **settings)


def test_samples_that_cannot_be_compared_are_told(ranks, tmp_path):
    ((digest, said),) = ranks(1, unsteady, tmp_path)
    assert digest.isalnum()
    assert "the training samples differ each time they are fetched" in said


def unsteady(folder):
    with redirect_stderr(io.StringIO()) as said:
        return told(folder, Unsteady()), said.getvalue()
