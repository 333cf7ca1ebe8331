"""Which members of a parametrised claim are tested each time."""

import pytest


def further(*values):
    """Members of a class whose first ones are tested each time: these are tested by `make test-matrix`."""
    return [
        pytest.param(*value, marks=pytest.mark.matrix)
        if isinstance(value, tuple)
        else pytest.param(value, marks=pytest.mark.matrix)
        for value in values
    ]
