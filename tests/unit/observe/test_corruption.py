"""Which runs of a step are right, and which ranks have computed wrongly."""

import pytest

from lockstep.observe.diagnose.corruption import RankRun, verdict

S = "S"


def run(*ranks):
    """Of each rank its shards' hashes, such as "0a 1b", and its sums."""
    return [RankRun(shards={int(w[0]): w[1:] for w in shards.split()}, total=total) for shards, total in ranks]


ALL_RIGHT = run(("0a", S), ("1b", S), ("2c", S))
MOVED = run(("1b", S), ("2c", S), ("0a", S))
MOVED_ON = run(("2c", S), ("0a", S), ("1b", S))
WRONG = run(("0a", "T"), ("1x", "T"), ("2c", "T"))
"""Rank 1, as always or once."""


@pytest.mark.parametrize(
    ("runs", "is_right", "shards", "totals"),
    [
        ([ALL_RIGHT, MOVED], True, {}, []),
        ([WRONG, MOVED], False, {}, []),
        ([WRONG, MOVED, MOVED_ON], True, {1: [1]}, []),
        (
            [WRONG, run(("1b", "U"), ("2x", "U"), ("0a", "U")), run(("2c", "V"), ("0x", "V"), ("1b", "V"))],
            False,
            None,
            [],
        ),
        ([ALL_RIGHT, run(("1b", S), ("2c", "T"), ("0a", S))], False, {}, [1]),
        ([run(("0a", S), ("1b", "T"), ("2c", S)), MOVED], True, {}, [1]),
        ([run(("0a", "T"), ("1b", "T"), ("2c", "T")), MOVED], False, {}, []),
        ([run(("0a", "T"), ("1b", "T"), ("2c", "T")), MOVED, MOVED_ON], True, {}, []),
        ([run(("0a", S), ("1x", S)), run(("1b", S), ("0a", S))], False, {}, []),
        ([run(("0a", S), ("1x", S)), run(("1b", S), ("0a", S)), run(("0a", S), ("1b", S))], True, {1: [1]}, []),
        ([run(("0a 1b", S)), run(("0a 1b", S))], True, {}, []),
        ([run(("0x 1b", "T")), run(("0a 1b", S))], False, {}, []),
        ([run(("0x 1b", "T")), run(("0a 1b", S)), run(("0a 1b", S))], True, {0: [0]}, []),
        ([run(("0a 1b", "T")), run(("0a 1b", S)), run(("0a 1b", S))], True, {}, [0]),
    ],
)
def test_the_majority_decides(runs, is_right, shards, totals):
    found = verdict(runs)
    assert found.is_right is is_right
    assert found.wrong_totals == totals and shards in (None, found.wrong_shards)
    assert found.is_undisturbed is (
        len({run.total for ranks in runs for run in ranks}) == 1 and len(runs) == 2 and is_right
    )


def test_once_it_is_left_out_one_run_is_enough():
    """Of three ranks, one is always wrong: each run has a wrong shard until the others share out all of them."""
    wrong = [
        run(("0a", "T"), ("1x", "T"), ("2c", "T")),
        run(("1b", "U"), ("2x", "U"), ("0a", "U")),
        run(("2c", "V"), ("0x", "V"), ("1b", "V")),
    ]
    assert verdict(wrong).culprits == {1}
    found = verdict([*wrong, run(("0a 1b", S), ("", S), ("2c", S))])
    assert found.is_right and not found.is_undisturbed
    assert found.described(["one", "two", "three"]) == (
        "rank 1 on two computes wrongly: its gradients of shards 0-2 differ from what the majority of runs agrees on"
    )
