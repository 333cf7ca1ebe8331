"""Votes on the runs of one step, by hashes: the runs that are right, and the ranks that have computed wrongly."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.observe.diagnose.hang_verdict import ranks_text


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """Results of one rank in one run of a step."""

    shards: Mapping[int, str]
    """Shard that it ran -> hash of loss and gradients."""
    total: str
    """Hash of the sums over all shards, which every rank holds."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    is_right: bool
    """Whether the latest run is right: each shard's gradients are those of a majority, and the sums of all ranks."""
    is_undisturbed: bool
    """Whether all runs gave the same."""
    wrong_shards: Mapping[int, Sequence[int]]
    """Rank -> the shards whose gradients it computed wrongly."""
    wrong_totals: Sequence[int]
    """The ranks that held other sums than the others of the same run."""

    @property
    def culprits(self) -> set[int]:
        return {*self.wrong_shards, *self.wrong_totals}

    def described(self, machines: Sequence[str]) -> str:
        """Name the ranks, with their machines, and what they computed wrongly."""
        whats: dict[int, list[str]] = defaultdict(list)
        for rank, shards in self.wrong_shards.items():
            whats[rank].append(f"its gradients of {ranks_text(shards).replace('rank', 'shard')}")
        for rank in self.wrong_totals:
            whats[rank].append("its sums over all shards")
        texts = [
            f"rank {rank} on {machines[rank]} computes wrongly: {' and '.join(what)} differ from what the majority of "
            "runs agrees on"
            for rank, what in sorted(whats.items())
        ]
        return "; ".join(texts) or "two runs of it gave other sums over the same gradients, and a third one decided"


def verdict(runs: Sequence[Sequence[RankRun]]) -> Verdict:
    """Judge two or more runs of a step. Ranks vote on each shard that they ran; one process alone, in each run."""
    is_alone = len(runs[0]) == 1
    answers: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for number, ranks in enumerate(runs):
        for rank, run in enumerate(ranks):
            for shard, value in run.shards.items():
                answers[shard].append((number if is_alone else rank, value))
    right = {shard: _agreed(given) for shard, given in answers.items()}
    wrong: dict[int, set[int]] = defaultdict(set)
    for shard, given in answers.items():
        for voter, value in given:
            if right[shard] not in (None, value):
                wrong[0 if is_alone else voter].add(shard)
    sound = [ranks for ranks in runs if _is_sound(ranks, right)]
    totals = Counter(run.total for ranks in sound for run in ranks).most_common(2)
    is_tie = len(totals) == 2 and totals[0][1] == totals[1][1]
    total = totals[0][0] if totals and not is_tie else None
    odd = [{rank for rank, run in enumerate(ranks) if run.total != total} for ranks in sound if total is not None]
    is_right = _is_sound(runs[-1], right) and {run.total for run in runs[-1]} == {total}
    return Verdict(
        is_right=is_right,
        is_undisturbed=is_right and len(totals) == 1 and len(sound) == len(runs),
        wrong_shards={rank: sorted(shards) for rank, shards in sorted(wrong.items())},
        wrong_totals=sorted(set[int]().union(*(each for each in odd if is_alone or len(each) < len(runs[0])))),
    )


def _agreed(answers: Iterable[tuple[int, str]]) -> str | None:
    """Return the hash that most voters gave, at least two of them; None where there is none."""
    votes = Counter(value for _, value in set(answers)).most_common(2)
    is_tie = len(votes) == 2 and votes[0][1] == votes[1][1]
    return None if is_tie or votes[0][1] == 1 else votes[0][0]


def _is_sound(ranks: Sequence[RankRun], right: Mapping[int, str | None]) -> bool:
    return all(value == right[shard] for run in ranks for shard, value in run.shards.items())
