"""launch.recovery=live with parallel.kind=fsdp and replicas: each process holds a part of the training state."""

import json
import sys
import time

import live_machines
import pytest
from chaos import DIGITS, MNIST, Chaos, differences, final_state, undisturbed
from chaos import SHARDED as PHASES
from live_machines import NODES, kill
from places import OWN
from running import lockstep, started, summary, wait_for_steps, workers

from lockstep.launch.elastic.live_coordinator import Coordinator
from lockstep.protocol.live_messages import Exit, MachineState, Position, WorkerReport

pytestmark = pytest.mark.timeout(300)
NORMED = OWN / "normed.py"
CONFIG = DIGITS.replace("{kind: cnn}", f"{{kind: user, file: {NORMED}}}")
LONG, SHORT, BRIEF = (CONFIG.replace("steps: 2000", f"steps: {steps}") for steps in (900, 200, 120))
SHARDED = ("parallel.kind=fsdp", "parallel.replicas=2", "observe.desync_every=10")
LIVE = ["launch.recovery=live", "launch.processes=4", "run.name=live", *SHARDED]
FAULTS = [
    *("kill-forward", "kill-gather", "kill-scatter", "kill-buffers", "kill-norm", "kill-ready", "kill-applying"),
    *("kill-agreement", "kill-after-step", "kill-evaluation", "kill-save", "kill-writing", "stop-gather"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The final state of the short run, undisturbed on one process."""
    return undisturbed(tmp_path_factory.mktemp("plain"), SHORT)


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """Of runs that dawdle between faults."""
    return undisturbed(tmp_path_factory.mktemp("brief"), BRIEF)


def test_faults_change_nothing(tmp_path, brief):
    """Of four processes, two of which hold the weights together. One that is lost takes the other one of its replica
    out of the training until it is back."""
    chaos = Chaos(tmp_path, BRIEF, processes=4, settings=SHARDED, dawdles=True)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    for fault in ("kill-gather", "kill-norm", "kill-ready", "stop-scatter", "kill-writing"):
        chaos.meet(fault)
    told = [json.loads(line)["message"] for line in chaos.regrouped()]
    assert any("training goes on; 2 processes now, 1 waits for the rest of a replica" in text for text in told), told
    assert any("2 processes joined; 4 processes now" in text for text in told)
    assert chaos.finish() == 0, chaos.text()
    assert "Starting again" not in chaos.text() and "Traceback" not in chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), brief) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_chaos(tmp_path, data_folder, capsys):
    """75 random faults; prints the table of faults by kind and phase. Where the last copy of a part is lost, the run
    starts again from a checkpoint."""
    config, began = MNIST.replace("DATA", str(data_folder)), time.monotonic()
    config = config.replace("every_steps: 50", "every_steps: 10").replace("steps: 2000", "steps: 900")
    reference = undisturbed(tmp_path, config)
    chaos = Chaos(tmp_path, config, processes=4, settings=SHARDED, often=PHASES)
    code = chaos.run(faults=75, pause_seconds=3.0)
    with capsys.disabled():
        sys.stdout.write(f"\n{time.monotonic() - began:.0f} s\n{chaos.table()}\n")
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert sum(chaos.counts.values()) >= 75, "the run is over too early"
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_faults_in_every_phase_change_nothing(tmp_path):
    """And further ones while these are mended: with three replicas, two faults do not take the last copy of a part."""
    reference = undisturbed(tmp_path, LONG)
    chaos = Chaos(tmp_path, LONG, processes=6, settings=(*SHARDED, "parallel.replicas=3"))
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    for fault in FAULTS:
        chaos.meet(fault)
    for phase in ("rendezvous", "connecting", "sending", "receiving", "placing-again", "assigned"):
        chaos.meet("kill-forward", f"kill-{phase}")
    for phase in ("connecting", "receiving", "placing-again"):  # of the formation in which those that wait come back
        before = len(chaos.regrouped())
        chaos.order("kill", "ready")
        chaos.wait(lambda before=before: len(chaos.regrouped()) > before, phase)
        chaos.meet(f"kill-{phase}")
    assert chaos.process.wait(200) == 0, chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []


def test_one_process_is_a_step_ahead(tmp_path, brief):
    """It has updated its weights when the others, which are ready to, lose their connections: they follow it, since the
    state before the step is nowhere whole any more."""
    chaos = Chaos(tmp_path, BRIEF, processes=4, settings=SHARDED, dawdles=True)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    for orders in (3, 4, 1):  # with four all of them run the step again
        before = len(chaos.regrouped())
        for _ in range(orders):
            chaos.order("fail", "ready")
        chaos.wait(lambda before=before: len(chaos.regrouped()) > before, orders)
    assert chaos.finish() == 0, chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), brief) == []


def test_the_last_copy_of_a_part_is_lost(tmp_path, brief):
    """The run starts again from its newest checkpoint, on all processes."""
    (tmp_path / "c.yaml").write_text(BRIEF)
    run = started(tmp_path, "train", "c.yaml", *LIVE, "checkpoint.every_steps=10")
    wait_for_steps(tmp_path / "runs" / "live", 8)
    for process in workers(run)[1::2]:
        process.kill()
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "no process is left that holds part 2 of 2 of the training state" in output
    assert "Starting again on 4 processes from step-" in output
    assert summary(tmp_path, "live")["digest"] == brief[0]


@pytest.mark.matrix
def test_resized_and_with_a_spare(tmp_path, plain):
    """To whole replicas."""
    (tmp_path / "c.yaml").write_text(SHORT)
    run = started(tmp_path, "train", "c.yaml", *LIVE, "launch.spares=1")
    wait_for_steps(tmp_path / "runs" / "live", 4)
    workers(run)[2].kill()
    wait_for_steps(tmp_path / "runs" / "live", 12)
    assert lockstep(tmp_path, "resize", "runs/live", "1").returncode == 0
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0 and "Starting again" not in output, output
    sizes = [each["world_size"] for each in summary(tmp_path, "live")["regrouped"]]
    assert sizes == [2, 4, 2], sizes
    assert differences(final_state(tmp_path / "runs" / "live"), plain) == []


@pytest.fixture
def machines(tmp_path, request):
    with live_machines.made(tmp_path, request.param) as found:
        yield found


@NODES
@pytest.mark.matrix
@pytest.mark.parametrize("machines", [2], indirect=True)
def test_a_machine_is_lost_with_its_replica(machines, tmp_path):
    """The first one, which decides; and before that a process of the other."""
    reference = undisturbed(tmp_path, live_machines.SHORT)
    settings = ("launch.processes=2", *SHARDED)
    first, second = machines.start(0, *settings), machines.start(1, *settings)
    wait_for_steps(machines.run, 2)
    workers(second)[1].kill()
    machines.wait_for_size(2)
    machines.wait_for_size(4)
    kill(first)
    machines.wait_for_size(2, times=2)
    third = machines.start(0, *settings)
    machines.wait_for_size(4, times=2)
    assert [second.wait(140), third.wait(60)] == [0, 0], machines.text()
    assert "node 0 is lost: node 1 (" in machines.text() and "Starting again" not in machines.text()
    assert differences(final_state(machines.run), reference) == []


def machine(reports, **changes):
    """Workers, by name: (position or None, part)."""
    plain = {
        name: found and WorkerReport(generation=found[0], position=found[1], part=found[2])
        for name, found in reports.items()
    }
    return {0: MachineState(round=1, workers=plain, is_training=True, **changes)}


@pytest.fixture
def coordinator():
    """Of four workers, each two of which hold the state together."""
    found = Coordinator("host:1", str, state_copies=2)
    formed = found.look(machine(dict.fromkeys(["0.0.1", "0.1.1", "0.2.1", "0.3.1"])), [0])
    assert formed.replica_size == 2 and [formed.part_of(name) for name in formed.members] == [0, 1, 0, 1]
    return found


def lost(*names):
    return {name: Exit(code=-9, text=f"{name} was killed") for name in names}


AT_3 = Position(step=3, settled=3)


def test_those_that_are_left_of_two_replicas_are_one(coordinator):
    there = {"0.0.1": (1, AT_3, 0), "0.3.1": (1, AT_3, 1)}
    formed = coordinator.look(machine(there, exits=lost("0.1.1", "0.2.1")), [0])
    assert formed.members == ("0.0.1", "0.3.1") and not coordinator.is_dead


def test_one_that_is_left_over_waits_until_another_is_prepared(coordinator):
    there = {"0.0.1": (1, AT_3, 0), "0.1.1": (1, AT_3, 1), "0.3.1": (1, AT_3, 1)}
    formed = coordinator.look(machine(there, exits=lost("0.2.1")), [0])
    assert formed.members == ("0.0.1", "0.1.1") and formed.generation == 2 and formed.num_waiting == 1
    there = {"0.0.1": None, "0.1.1": None, "0.3.1": (2, AT_3, 1), "0.2.2": (2, Position(), None)}
    asked = coordinator.look(machine(there), [0])
    assert asked.assigned == {"0.2.2": 0} and not asked.is_wanted
    there["0.2.2"] = (2, Position(), 0)
    assert coordinator.look(machine(there), [0]).is_wanted
    there |= {"0.0.1": (2, AT_3, 0), "0.1.1": (2, AT_3, 1)}
    formed = coordinator.look(machine(there), [0])
    assert formed.members == ("0.0.1", "0.1.1", "0.2.2", "0.3.1") and formed.num_waiting == 0
    assert formed.positions == (AT_3, AT_3, Position(), Position())  # what 0.3.1 has is old


def test_a_part_that_nobody_has_any_more(coordinator):
    there = {"0.0.1": (1, AT_3, 0), "0.2.1": (1, AT_3, 0), "0.1.2": (0, Position(), 1)}
    coordinator.look(machine(there, exits=lost("0.1.1", "0.3.1")), [0])
    assert coordinator.is_dead and coordinator.missing == [1]


def test_parts_of_different_steps_are_no_state(coordinator):
    """What those that are left hold is never mixed, whatever they report."""
    later = Position(step=50, settled=50)
    there = {"0.0.1": (1, later, 0), "0.1.1": (1, AT_3, 1)}
    coordinator.look(machine(there, exits=lost("0.2.1", "0.3.1")), [0])
    assert coordinator.is_dead and coordinator.missing == [1]


@pytest.mark.parametrize(("step", "is_dead"), [(4, False), (5, True)])
def test_one_that_is_ready_is_as_good_as_a_step_further(coordinator, step, is_dead):
    ready, ahead = Position(step=3, settled=3, is_ready=True), Position(step=step, settled=3)
    there = {"0.0.1": (1, ready, 0), "0.1.1": (1, ahead, 1)}
    coordinator.look(machine(there, exits=lost("0.2.1", "0.3.1")), [0])
    assert coordinator.is_dead == is_dead


def test_parts_are_assigned_evenly(coordinator):
    there = dict.fromkeys(["0.0.1", "0.1.1", "0.2.1", "0.3.1"]) | {
        f"0.{slot}.1": (1, Position(), None) for slot in (4, 5, 6)
    }
    assert coordinator.look(machine(there), [0]).assigned == {"0.4.1": 0, "0.5.1": 1, "0.6.1": 0}


def test_spares_are_assigned_no_part_before_they_are_needed(coordinator):
    there = dict.fromkeys(["0.0.1", "0.1.1", "0.2.1", "0.3.1"]) | {"0.4.1": (1, Position(), None)}
    assert coordinator.look(machine(there, spares=("0.4.1",)), [0]).assigned == {}
