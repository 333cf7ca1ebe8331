"""Which of several runs of one step are right, and which ranks have computed wrongly: by majority, from hashes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.observe.diagnose.hang_verdict import ranks_text


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank gave in one run of a step."""

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
    wrong_shards: Mapping[int, tuple[int, ...]]
    """Rank -> the shards whose gradients it computed wrongly."""
    wrong_totals: tuple[int, ...]
    """The ranks that held other sums than the others of the same run."""
    witnesses: Mapping[int, int]
    """Shard -> a rank that computed it rightly."""

    @property
    def culprits(self) -> list[int]:
        return sorted({*self.wrong_shards, *self.wrong_totals})

    def described(self, machines: Sequence[str]) -> str:
        """Name the ranks, with their machines, and what they computed wrongly."""
        whats: dict[int, list[str]] = defaultdict(list)
        for rank, shards in self.wrong_shards.items():
            numbers = ranks_text(shards).partition(" ")[2]
            whats[rank].append(f"its gradients of shard{'s' if len(shards) > 1 else ''} {numbers}")
        for rank in self.wrong_totals:
            whats[rank].append("its sums over all shards")
        texts = [
            f"rank {rank} on {machines[rank]} computes wrongly: {' and '.join(what)} differ from what the majority of "
            "runs agrees on"
            for rank, what in sorted(whats.items())
        ]
        return "; ".join(texts) or "two runs of it gave other sums over the same gradients, and a third one decided"


def verdict(runs: Sequence[Sequence[RankRun]]) -> Verdict:
    """Judge at least two runs of a step, each with what every rank gave. Ranks vote on each shard that they ran; one
    process alone votes in each run."""
    answers: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for number, ranks in enumerate(runs):
        for rank, run in enumerate(ranks):
            for shard, value in run.shards.items():
                answers[shard].append((rank, number if len(ranks) == 1 else rank, value))
    right = {shard: _agreed((voter, value) for _, voter, value in given) for shard, given in answers.items()}
    wrong, witnesses = defaultdict[int, set[int]](set), dict[int, int]()
    for shard, given in answers.items():
        for rank, _, value in given:
            if value == right[shard]:
                witnesses.setdefault(shard, rank)
            elif right[shard] is not None:
                wrong[rank].add(shard)
    sound = [ranks for ranks in runs if _is_sound(ranks, right)]
    totals = Counter(run.total for ranks in sound for run in ranks).most_common(2)
    total = totals[0][0] if totals and (len(totals) == 1 or totals[0][1] > totals[1][1]) else None
    last = {run.total for run in runs[-1]}
    is_right = _is_sound(runs[-1], right) and last == {total}
    return Verdict(
        is_right=is_right,
        is_undisturbed=is_right and len(totals) == 1 and len(sound) == len(runs),
        wrong_shards={rank: tuple(sorted(shards)) for rank, shards in sorted(wrong.items())},
        wrong_totals=tuple(sorted({rank for ranks in sound for rank in _odd_ranks(ranks, total)})),
        witnesses=witnesses,
    )


def _agreed(answers: Iterable[tuple[int, str]]) -> str | None:
    """Return the hash that most voters gave, at least two of them; None where there is none."""
    votes = Counter(value for _, value in set(answers)).most_common(2)
    is_tie = len(votes) == 2 and votes[0][1] == votes[1][1]
    return None if is_tie or votes[0][1] == 1 else votes[0][0]


def _is_sound(ranks: Sequence[RankRun], right: Mapping[int, str | None]) -> bool:
    return all(value == right[shard] for run in ranks for shard, value in run.shards.items())


def _odd_ranks(ranks: Sequence[RankRun], total: str | None) -> list[int]:
    """Return the ranks without the right sums, in a run in which others had them, or there were no others."""
    odd = [rank for rank, run in enumerate(ranks) if run.total != total]
    return odd if total is not None and (len(odd) < len(ranks) or len(ranks) == 1) else []
