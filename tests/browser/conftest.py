import pytest
from browsing import opened_browser


@pytest.fixture
def browser():
    with opened_browser() as driver:
        yield driver
