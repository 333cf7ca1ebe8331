"""A process is killed at every file operation of a save: a whole checkpoint is found, and the run ends with its bits."""

import json

import pytest
import warm


def tried(folder, world, victim, every=1):
    """One of `every` points, as crashing.py tells it, and the digest of the run that was not killed."""
    done = warm.run(["crashing", folder, world, victim, every], timeout=550)
    assert done.returncode == 0, done.stderr
    *points, last = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"{len(points)} points tried, W = {world}, rank {victim} killed")  # noqa: T201
    return points, last["undisturbed"]


def check(points, digest):
    kinds = {point["at"].split()[0] for point in points}
    for point in points:
        assert point["killed"], point
        assert point["whole"] in ("step-000000001", "step-000000002"), point
        assert point["digest"] == digest, point
        assert point["steps"] == [1, 2, 3, 4, 4], point  # each step once, then the evaluation at the end
        assert point["left"] == ["step-000000004"], point
    return kinds


def test_killed_at_some_file_operations(tmp_path):
    points, digest = tried(tmp_path, 1, 0, every=8)
    check(points, digest)
    assert len(points) > 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return tried(tmp_path_factory.mktemp("alone"), 1, 0)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_killed_at_every_file_operation(alone):
    points, digest = alone
    kinds = check(points, digest)
    assert kinds >= {"open", "write", "fsync", "os.rename", "os.mkdir", "os.scandir", "os.remove", "os.rmdir"}
    assert {point["whole"] for point in points} == {"step-000000001", "step-000000002"}
    assert len(points) > 30


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_at_every_file_operation_of_a_shared_save(alone, tmp_path, victim):
    """Two ranks write, each its part; the one that is not killed loses its peer, and a new pair goes on."""
    points, digest = tried(tmp_path, 2, victim)
    assert digest == alone[1]
    check(points, digest)
    assert len(points) > (30 if victim == 0 else 5)
