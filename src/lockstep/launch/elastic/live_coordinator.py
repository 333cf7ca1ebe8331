"""Decides which workers train together with launch.recovery=live, from the machines' states. It runs on the leader."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.protocol.live_messages import Exit, Formation, MachineState, Position, WorkerReport, machine_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A worker that may be a member of the next formation."""

    name: str
    part: int
    """Part of the training state that it holds or is prepared for."""
    position: Position
    leaves: bool = False
    """Whether `lockstep resize` removes it, as soon as the others can go on without it."""

    def has(self, step: int) -> bool:
        """Return whether it has a training state of this step or a later one, or can have it at once."""
        return self.position.has_state and self.position.step + self.position.is_ready >= step


def chosen(candidates: Collection[Candidate], replica_size: int) -> list[Candidate] | None:
    """Return the members of as many replicas as possible, by rank; None where a part of the training state is lost."""
    for group in ([each for each in candidates if not each.leaves], candidates):
        ordered = sorted(group, key=lambda each: not each.position.has_state)
        by_part = [[each for each in ordered if each.part == part] for part in range(replica_size)]
        members = [part[replica] for replica in range(min(map(len, by_part))) for part in by_part]
        if members and not missing(members, replica_size):
            return members
    return None


def missing(candidates: Collection[Candidate], replica_size: int) -> list[int]:
    """List the parts of the training state that no candidate has at the furthest step, or can have at once."""
    furthest = max((each.position.step for each in candidates), default=0)
    there = {each.part for each in candidates if each.has(furthest)}
    return [part for part in range(replica_size) if part not in there]


class Coordinator:
    def __init__(self, meeting: str, machine_name: Callable[[int], str], state_copies: int | None = None) -> None:
        """`state_copies`: see Plan."""
        self.meeting, self.machine_name, self.state_copies = meeting, machine_name, state_copies
        self.formation = Formation()
        self.losses: dict[str, str] = {}
        """Members of the present formation that are lost: name -> what happened, for the user."""
        self.is_dead = False
        """Whether all members are lost that had a training state, or a part of it."""
        self.missing: list[int] = []
        """Parts of the training state that no worker has, once all remaining members wait for a new formation."""

    def look(self, machines: Mapping[int, MachineState], expected: Sequence[int]) -> Formation:
        """Return the formation that follows from the machines' states; those of the round are `expected`."""
        known = max((state.formation for state in machines.values()), key=lambda each: each.version)
        if known.version > self.formation.version:  # that of an earlier leader
            self.formation, self.losses = known, {}
        has_failed = any(exit.code > 0 for _, exit in self._exits(machines))  # which ends the round
        if not self.formation.generation:
            self._form_first(machines, expected)
        elif not (self.formation.is_over or has_failed):
            self._note_losses(machines)
            self._form(machines)
        return self.formation

    def _change(self, **changes: Any) -> None:
        self.formation = replace(self.formation, version=self.formation.version + 1, **changes)

    def _form_first(self, machines: Mapping[int, MachineState], expected: Sequence[int]) -> None:
        if all(number in machines for number in expected):
            members = tuple(name for number in expected for name in machines[number].workers)
            size = 1 if self.state_copies is None else max(1, len(members) // self.state_copies)
            self._change(generation=1, members=members, meeting=self.meeting, replica_size=size)

    def _exits(self, machines: Mapping[int, MachineState]) -> Iterator[tuple[str, Exit]]:
        for name in self.formation.members:
            state = machines.get(machine_of(name))
            if state is not None and name in state.exits:
                yield name, state.exits[name]

    def _note_losses(self, machines: Mapping[int, MachineState]) -> None:
        members = self.formation.members
        if not self.formation.is_training and any(state.is_training for state in machines.values()):
            self._change(is_training=True)
        exits = dict(self._exits(machines))
        if members[0] in exits and exits[members[0]].code == 0:  # it has written the run's results
            self._change(is_over=True)
            return
        lost = {name: exit.text for name, exit in exits.items() if exit.code < 0}
        for number in self.formation.machines:
            if number not in machines:
                there = [name for name in members if machine_of(name) == number]
                lost |= dict.fromkeys(there, "") | {there[0]: self._machine_loss(number, there)}
        new = lost.keys() - self.losses.keys()
        self.losses = {**self.losses, **{name: lost[name] for name in members if name in new}}
        running = {name for state in machines.values() for name in state.workers}
        self.is_dead = bool(self.losses) and running.isdisjoint(members)
        if new and not self.formation.is_broken:
            self._change(is_broken=True)

    def _machine_loss(self, number: int, there: Sequence[str]) -> str:
        ranks = ", ".join(str(self.formation.members.index(name)) for name in there)
        return f"{self.machine_name(number)} is lost, with rank{'s' if len(there) > 1 else ''} {ranks}"

    def _form(self, machines: Mapping[int, MachineState]) -> None:
        """Make a new formation once all remaining members wait; ask them to wait when others can join or leave."""
        generation, members = self.formation.generation, self.formation.members
        states = machines.values()
        reports = {name: report for state in states for name, report in state.workers.items()}
        leaving = {name for state in states for name in state.leaving}
        spares = {name for state in states for name in state.spares}
        waiting = {n: report.position for n, report in reports.items() if report and report.generation >= generation}
        left = [name for name in members if name in reports]
        if any(name in waiting for name in left) and not self.formation.is_broken:
            self._change(is_broken=True)
        others = {n: report for n, report in reports.items() if report and n not in {*members, *leaving, *spares}}
        self._assign(reports.keys() - leaving - spares, others)
        joining = [
            Candidate(name=name, part=report.part, position=Position())
            for name, report in others.items()
            if report.part is not None
        ]
        if left and all(name in waiting for name in left):
            self._form_of([*self._left(left, waiting, leaving), *joining])
        elif not (self.formation.is_wanted or self.formation.is_broken):
            has_state = dict.fromkeys(left, Position(step=0))
            possible = chosen([*self._left(left, has_state, leaving), *joining], self.formation.replica_size)
            if possible is not None and {each.name for each in possible} != set(members):
                self._change(is_wanted=True)

    def _left(
        self, left: Sequence[str], positions: Mapping[str, Position], leaving: Collection[str]
    ) -> Iterator[Candidate]:
        for name in left:
            part = self.formation.part_of(name)
            yield Candidate(name=name, part=part, position=positions[name], leaves=name in leaving)

    def _assign(self, running: Collection[str], others: Mapping[str, WorkerReport]) -> None:
        """Give each worker that is prepared for no part of the training state the one that the fewest have."""
        formation = self.formation
        new = [name for name, report in others.items() if report.part is None and name not in formation.assigned]
        if not new:
            return
        assigned = {name: part for name, part in formation.assigned.items() if name in running}
        parts = {name: report.part for name, report in others.items() if report.part is not None} | assigned
        parts |= {name: formation.part_of(name) for name in formation.members if name in running}
        for name in new:
            counts = Counter(parts.values())
            parts[name] = assigned[name] = min(range(formation.replica_size), key=lambda part: counts[part])
        self._change(assigned=assigned)

    def _form_of(self, candidates: Sequence[Candidate]) -> None:
        members = chosen(candidates, self.formation.replica_size)
        if members is None:
            self.missing = missing(candidates, self.formation.replica_size)
            self.is_dead = True
            return
        self._change(
            generation=self.formation.generation + 1,
            members=tuple(each.name for each in members),
            positions=tuple(each.position for each in members),
            num_waiting=sum(not each.leaves for each in candidates if each not in members),
            losses=tuple(text for text in self.losses.values() if text),
            meeting=self.meeting,
            is_broken=False,
            is_wanted=False,
        )
        self.losses = {}
