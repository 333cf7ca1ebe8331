"""Decides who trains together with launch.recovery=live, from the states of all machines. It runs on the leader."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.launch.elastic.live_notes import Exit, Formation, MachineState, Position, WorkerReport, machine_of


class Coordinator:
    def __init__(self, meeting: str, machine_name: Callable[[int], str]) -> None:
        """`meeting`: HOST:PORT of the store in which the members of a formation find each other."""
        self.meeting, self.machine_name = meeting, machine_name
        self.formation = Formation()
        self.losses: dict[str, str] = {}
        """Members of the present formation that are lost: name -> what happened, for the user."""
        self.is_dead = False
        """Whether all members are lost that had a training state."""

    def look(self, machines: Mapping[int, MachineState], expected: Sequence[int]) -> Formation:
        """The formation that follows from what is known of the machines; those of the round are `expected`."""
        known = max((state.formation for state in machines.values()), key=lambda each: each.version)
        if known.version > self.formation.version:  # that of an earlier leader
            self.formation, self.losses = known, {}
        if not self.formation.generation:
            self._form_first(machines, expected)
        elif not (self.formation.is_over or self._has_failed(machines)):
            self._note_losses(machines)
            self._form(machines)
        return self.formation

    def _change(self, **changes: Any) -> None:
        self.formation = replace(self.formation, version=self.formation.version + 1, **changes)

    def _form_first(self, machines: Mapping[int, MachineState], expected: Sequence[int]) -> None:
        if all(number in machines for number in expected):
            members = tuple(name for number in expected for name in machines[number].workers)
            self._change(generation=1, members=members, meeting=self.meeting)

    def _has_failed(self, machines: Mapping[int, MachineState]) -> bool:
        """Whether a member has ended with an error, which ends the round."""
        return any(exit.code > 0 for _, exit in self._exits(machines))

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
        """A new formation once every member that is left has come for it; they are asked to come when another worker
        waits."""
        generation, members = self.formation.generation, self.formation.members
        reports: dict[str, WorkerReport | None] = {}
        leaving: set[str] = set()
        spares: set[str] = set()
        for state in machines.values():
            reports |= state.workers
            leaving |= set(state.leaving)
            spares |= set(state.spares)
        waiting = {n: report.position for n, report in reports.items() if report and report.generation >= generation}
        others = {*members, *leaving, *spares}
        joining = [name for name, report in reports.items() if report and name not in others]
        left = [name for name in members if name in reports]
        if any(name in waiting for name in left) and not self.formation.is_broken:
            self._change(is_broken=True)
        if left and all(name in waiting for name in left):
            stay = [name for name in left if name not in leaving]
            if not any(waiting[name].has_state for name in stay):  # until another worker has one
                stay = left
            self._form_with({name: waiting[name] for name in stay} | dict.fromkeys(joining, Position()))
        elif (joining or 0 < len(leaving & set(left)) < len(left)) and not (
            self.formation.is_wanted or self.formation.is_broken
        ):
            self._change(is_wanted=True)

    def _form_with(self, positions: Mapping[str, Position]) -> None:
        if not any(position.has_state for position in positions.values()):
            self.is_dead = True
            return
        self._change(
            generation=self.formation.generation + 1,
            members=tuple(positions),
            positions=tuple(positions.values()),
            losses=tuple(text for text in self.losses.values() if text),
            meeting=self.meeting,
            is_broken=False,
            is_wanted=False,
        )
        self.losses = {}
