"""launch.recovery=live on several machines, as network namespaces: one is lost or cut off while the others train on."""

import re
import signal

import live_machines
import pytest
from chaos import differences, final_state, undisturbed
from live_lines import lines
from live_machines import NODES, SHORT, kill, terminate
from networks import set_link
from running import lockstep, summary, wait_for_steps

from lockstep.base.errors import Interrupted
from lockstep.launch.elastic import leader_failover
from lockstep.launch.elastic.live_coordinator import Coordinator
from lockstep.launch.launchers.local import Config
from lockstep.protocol.live_messages import Exit, MachineState, Position, WorkerReport

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The final state and the metrics of the run, undisturbed on one process."""
    folder = tmp_path_factory.mktemp("plain")
    return undisturbed(folder, SHORT), lines(folder / "runs" / "plain")


@pytest.fixture
def machines(tmp_path, request):
    with live_machines.made(tmp_path, request.param) as found:
        yield found


@NODES
@pytest.mark.matrix
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_machine_that_is_lost_and_started_again(machines, plain):
    first, second = machines.start(0), machines.start(1)
    wait_for_steps(machines.run, 2)
    kill(second)
    machines.wait_for_size(1)
    third = machines.start(1)
    machines.wait_for_size(2)
    assert [first.wait(140), third.wait(60)] == [0, 0], machines.text()
    assert "node 1 (" in machines.text() and "Starting again" not in machines.text()
    assert differences(final_state(machines.run), plain[0]) == []
    assert lines(machines.run) == plain[1]
    sizes = [each["world_size"] for each in summary(machines.folder, "live")["regrouped"]]
    assert sizes == [1, 2]


def replaced(machines):
    """The second machine is lost, and another one started in its place, as Slurm does -> the first, the other one."""
    first, second = machines.start(0), machines.start(1)
    wait_for_steps(machines.run, 2)
    kill(second)
    machines.wait_for_size(1)
    third = machines.start(1, node_rank=3)
    machines.wait_for_size(2)
    return first, third


@NODES
@pytest.mark.matrix  # tests/cluster shows it on a real cluster
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_one_in_the_place_of_a_lost_machine_leaves(machines, plain):
    """It has a job of its own: a signal to that, as by a preemption, is not one to the run."""
    first, third = replaced(machines)
    terminate(third)
    assert third.wait(30) == 0, machines.text()
    machines.wait_for_size(1, times=2)
    assert first.wait(140) == 0, machines.text()
    assert "leaves the run (SIGTERM); the others go on" in machines.text() and "go on with: " not in machines.text()
    assert differences(final_state(machines.run), plain[0]) == []
    assert lines(machines.run) == plain[1]
    assert [each["world_size"] for each in summary(machines.folder, "live")["regrouped"]] == [1, 2, 1]


@NODES
@pytest.mark.matrix
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_one_in_the_place_of_a_lost_machine_is_the_last(machines, plain):
    """Then a signal to it is one to the run, which saves and ends."""
    first, third = replaced(machines)
    kill(first)
    machines.wait_for_size(1, times=2)
    terminate(third)
    assert third.wait(30) == Interrupted.exit_code, machines.text()
    assert "stopped by a signal after step" in machines.text() and "go on with: " in machines.text()
    resumed = lockstep(machines.folder, "train", "runs/live/recipe.yaml", "launch.nodes=1")
    assert resumed.returncode == 0 and "resumed after step" in resumed.stdout, resumed.stdout + resumed.stderr
    assert differences(final_state(machines.run), plain[0]) == []


@NODES
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_the_first_machine_is_lost_and_started_again(machines, plain):
    """The other one decides from there on; node 0 joins it, although it is back before the other has missed it."""
    first, second = machines.start(0), machines.start(1)
    wait_for_steps(machines.run, 20)
    second.send_signal(signal.SIGSTOP)  # else it may have missed node 0 first, where starting takes long
    kill(first)
    first = machines.start(0)
    machines.wait(lambda: "waiting up to 7 s to see who decides" in machines.text())
    second.send_signal(signal.SIGCONT)
    machines.wait_for_size(2)
    assert [first.wait(140), second.wait(60)] == [0, 0], machines.text()
    assert "node 0 is lost: node 1 (" in machines.text() and "Starting again" not in machines.text()
    assert differences(final_state(machines.run), plain[0]) == []
    assert lines(machines.run) == plain[1]


@NODES
@pytest.mark.parametrize("machines", [3], indirect=True)
def test_the_first_machine_is_cut_off(machines, plain):
    """The others are the majority, and go on without it; it stops, and joins them again."""
    running = [machines.start(number) for number in range(3)]
    wait_for_steps(machines.run, 2)
    set_link(0, "down")
    machines.wait_for_size(2)
    machines.wait(lambda: "most of the machines are lost at once" in machines.text())
    set_link(0, "up")
    machines.wait_for_size(3)
    assert [process.wait(140) for process in running] == [0, 0, 0], machines.text()
    assert differences(final_state(machines.run), plain[0]) == []
    assert lines(machines.run) == plain[1]


@NODES
@pytest.mark.matrix
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_link_is_cut_and_mended(machines, plain):
    first, second = machines.start(0), machines.start(1)
    wait_for_steps(machines.run, 2)
    set_link(1, "down")
    machines.wait_for_size(1)
    machines.wait(lambda: "tries to join again" in machines.text())
    set_link(1, "up")
    machines.wait_for_size(2)
    assert [first.wait(140), second.wait(60)] == [0, 0], machines.text()
    assert differences(final_state(machines.run), plain[0]) == []
    assert lines(machines.run) == plain[1]
    assert re.search(r"node 1 \(.*\) is lost, with rank 1", machines.text())


# ---- the coordinator


def machine(number, *slots, waits_after=None, **changes):
    """A machine with a worker in each of these slots, which wait for a formation after `waits_after`."""
    report = None if waits_after is None else WorkerReport(generation=waits_after, position=Position(step=3, settled=3))
    return MachineState(round=1, workers={f"{number}.{slot}.1": report for slot in slots}, **changes)


@pytest.fixture
def coordinator():
    """Of two machines with two workers each, which train."""
    found = Coordinator("host:1", lambda number: f"node {number}")
    assert found.look({0: machine(0, 0, 1)}, [0, 1]).generation == 0  # the other one has not come
    first = found.look({0: machine(0, 0, 1), 1: machine(1, 0, 1)}, [0, 1])
    assert first.members == ("0.0.1", "0.1.1", "1.0.1", "1.1.1") and (first.meeting, first.version) == ("host:1", 1)
    assert found.look({0: machine(0, 0, 1, is_training=True), 1: machine(1, 0, 1)}, [0, 1]).is_training
    return found


def test_a_lost_machine_is_told_once(coordinator):
    assert coordinator.look({1: machine(1, 0, 1)}, [1]).is_broken
    assert coordinator.look({1: machine(1, 0, 1, waits_after=1)}, [1]).losses == ("node 0 is lost, with ranks 0, 1",)
    assert coordinator.formation.members == ("1.0.1", "1.1.1") and not coordinator.is_dead


def test_nobody_is_left_out_while_one_has_not_come(coordinator):
    lost = {"0.1.1": Exit(code=-9, text="rank 1 was killed")}
    there = {0: machine(0, 0, waits_after=1, exits=lost), 1: machine(1, 0, 1)}
    assert coordinator.look(there, [0, 1]).generation == 1 and coordinator.formation.is_broken
    there[1] = machine(1, 0, 1, waits_after=1)
    assert coordinator.look(there, [0, 1]).members == ("0.0.1", "1.0.1", "1.1.1")
    assert coordinator.formation.losses == ("rank 1 was killed",)


def test_who_ends_regularly_is_not_lost(coordinator):
    ended = {"1.1.1": Exit(code=0, text="")}
    assert not coordinator.look({0: machine(0, 0, 1), 1: machine(1, 0, exits=ended)}, [0, 1]).is_broken
    ended = {"0.0.1": Exit(code=0, text="")}
    assert coordinator.look({0: machine(0, 1, exits=ended), 1: machine(1, 0, 1)}, [0, 1]).is_over


def test_an_error_leaves_the_formation_to_the_end_of_the_round(coordinator):
    failed = {"1.1.1": Exit(code=1, text="")}
    assert not coordinator.look({0: machine(0, 0, 1), 1: machine(1, 0, exits=failed)}, [0, 1]).is_broken


def test_all_are_lost(coordinator):
    killed = {f"0.{slot}.1": Exit(code=-9, text="killed") for slot in (0, 1)}
    coordinator.look({0: machine(0, exits=killed)}, [0])
    assert coordinator.is_dead


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", '{"endpoint": 3}', '{"endpoint": "x"}', '{"endpoint": "127.0.0.1:9"}']
)
def test_a_note_of_a_leader_that_is_of_no_use(tmp_path, text):
    if text is not None:
        (tmp_path / leader_failover.NOTE).write_text(text)
    assert leader_failover.other_leader(tmp_path, Config(kind="local", recovery="live")) is None


def pair(coordinator, *, waits_after, lost=(), leaving=(), joins=()):
    """The state of a single machine whose workers 0 and 1 are members, without the `lost` ones."""
    report = WorkerReport(generation=waits_after, position=Position(step=3, settled=3))
    there = {name: report for name in ("0.0.1", "0.1.1") if name not in lost}
    there |= dict.fromkeys(joins, WorkerReport(generation=0, position=Position()))
    exits = {name: Exit(code=-9, text=f"{name} was killed") for name in lost}
    state = MachineState(round=1, workers=there, exits=exits, leaving=leaving, is_training=True)
    return coordinator.look({0: state}, [0])


@pytest.fixture
def single():
    """Of one machine with two workers."""
    found = Coordinator("host:1", str)
    found.look({0: MachineState(round=1, workers={"0.0.1": None, "0.1.1": None}, is_training=True)}, [0])
    return found


def test_one_that_has_no_state_yet_does_not_go_on_alone(single):
    """The round ends, and the run restarts from its newest checkpoint."""
    formed = pair(single, waits_after=1, lost=["0.1.1"], joins=["0.1.2"])
    assert formed.members == ("0.0.1", "0.1.2") and formed.positions[1] == Position()
    waiting = {"0.1.2": WorkerReport(generation=2, position=Position())}
    exits = {"0.0.1": Exit(code=-9, text="killed")}
    after = single.look({0: MachineState(round=1, workers=waiting, exits=exits)}, [0])
    assert single.is_dead and after.generation == 2


def test_the_only_one_with_a_state_stays_until_another_has_it(single):
    """The run is made smaller by worker 1, and then loses worker 0."""
    assert pair(single, waits_after=0, leaving=("0.1.1",)).is_wanted
    formed = pair(single, waits_after=1, lost=["0.0.1"], leaving=("0.1.1",), joins=["0.2.1"])
    assert formed.members == ("0.1.1", "0.2.1") and not single.is_dead


def test_one_that_leaves_stays_where_it_is_the_last(single):
    assert pair(single, waits_after=1, lost=["0.0.1"], leaving=("0.1.1",)).members == ("0.1.1",)
    assert not pair(single, waits_after=1, lost=["0.0.1"], leaving=("0.1.1",)).is_wanted
