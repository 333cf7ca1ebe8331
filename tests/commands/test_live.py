"""launch.recovery=live: processes are killed, stopped, added and removed while the others train on, to the same bits."""

import json
import re
import signal
import sys
import threading
import time

import pytest
import torch
from chaos import DIGITS, MNIST, TEXTS, Chaos, differences, final_state, undisturbed
from filelock import FileLock
from live_lines import lines
from places import OWN
from pydantic_core import to_json
from running import lockstep, started, summary, wait_for_steps, workers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.base.events import Evaluated, StepDone
from lockstep.base.world import OVER_NCCL
from lockstep.protocol.live_messages import FORMATION, Formation, Position
from lockstep.run.tasks.train_live import Backlog

pytestmark = pytest.mark.timeout(300)
LONG, SHORT, BRIEF = (DIGITS.replace("steps: 2000", f"steps: {steps}") for steps in (150, 200, 60))
"""LONG and BRIEF are of runs that dawdle between faults."""
FAULTS = [
    *("kill-forward", "kill-shared-memory", "kill-buffers", "kill-optimizer", "kill-agreement", "kill-after-step"),
    *("kill-evaluation", "kill-save", "kill-writing", "kill-renaming", "crash-forward", "stop-shared-memory"),
]
LIVE = ["launch.recovery=live", "launch.processes=3", "run.name=live"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The final state of the short run, undisturbed on one process."""
    return undisturbed(tmp_path_factory.mktemp("plain"), SHORT)


@pytest.fixture(scope="module")
def long_plain(tmp_path_factory):
    """The final state and the metrics of the long run, undisturbed on one process."""
    folder = tmp_path_factory.mktemp("plain")
    return undisturbed(folder, LONG), lines(folder / "runs" / "plain")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """The same run on three processes, with a fault in each phase, and others while these are mended."""
    chaos = Chaos(tmp_path_factory.mktemp("live"), LONG, dawdles=True)
    chaos.start()
    wait_for_steps(chaos.folder / "runs" / "live", 1)
    for fault in FAULTS:
        chaos.meet(fault)
    for phase in ("rendezvous", "connecting", "sending", "receiving", "placing"):
        chaos.meet("kill-forward", f"kill-{phase}")
    assert chaos.finish() == 0, chaos.text()
    return chaos


def test_faults_change_nothing(disturbed, long_plain):
    assert differences(final_state(disturbed.folder / "runs" / "live"), long_plain[0]) == []
    assert lines(disturbed.folder / "runs" / "live") == long_plain[1]


def test_tensorboard_shows_each_step_once(disturbed, long_plain):
    """Also where rank 0 was lost before its writer had written the last steps down."""
    accumulator = EventAccumulator(str(disturbed.folder / "runs" / "live" / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    expected = [line["step"] for line in long_plain[1] if line["kind"] == "step"]
    assert [event.step for event in accumulator.Scalars("train/loss")] == expected


def test_each_loss_is_told(disturbed):
    output, told = disturbed.text(), summary(disturbed.folder, "live")["regrouped"]
    assert "Starting again" not in output and "Traceback" not in output and "Exception raised from" not in output
    assert len(re.findall(r"rank \d \(process \d+\) (was killed|crashed)", output)) >= len(FAULTS)
    assert re.search(r"after step \d+: training goes on(, and 1 process joined)?; [23] processes now, \d", output)
    assert re.search(r"after step \d+: 1 process joined; 3 processes now, \d", output)
    assert sum(len(each["losses"]) for each in told) >= len(FAULTS) and told[-1]["world_size"] == 3
    history = (disturbed.folder / "runs" / "live" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in history].count("started") == 1
    assert "training goes on" in (disturbed.folder / "runs" / "live" / "report.html").read_text()


def test_a_step_that_fails_after_the_buffers_were_updated(tmp_path):
    """On all processes: none has finished the step, and they run it again."""
    own = str(OWN / "normed.py")
    settings = ("model.kind=user", f"model.file={own}", "train.precision=fp16", "train.ema=null")
    config = BRIEF.replace("{kind: cnn}", "{}")
    reference = undisturbed(tmp_path, config, settings)
    chaos = Chaos(tmp_path, config, settings=settings, dawdles=True)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    before = len(chaos.regrouped())
    for _ in range(chaos.processes):
        chaos.order("fail", "unscaling")
    chaos.wait(lambda: len(chaos.regrouped()) > before, "all")
    assert chaos.finish() == 0, chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []


LATE = pytest.param(("launch.collective_timeout_seconds=2",), marks=pytest.mark.matrix)


@pytest.mark.parametrize("settings", [("observe.on_hang=restart",), LATE])
def test_a_process_that_hangs(tmp_path, settings):
    """Found by the thread that watches, or since the others have waited for longer than collectives may take."""
    reference = undisturbed(tmp_path, BRIEF)
    chaos = Chaos(tmp_path, BRIEF, settings=("observe.hang_seconds=1.5", *settings), dawdles=True)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    chaos.meet("hang-forward")
    chaos.meet("hang-after-step", "kill-forward")  # in the new process group DDP waits, too
    assert chaos.finish() == 0, chaos.text()
    assert "Starting again" not in chaos.text() and "Traceback" not in chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []


ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two processes"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPUS)])
def test_what_a_lost_collective_leaves_is_not_used(tmp_path, monkeypatch, device, long_plain):
    """Over NCCL it ends without an error: so the processes agree before each update, and after each evaluation."""
    monkeypatch.setenv(OVER_NCCL, "1")
    on_device = (f"run.device={device}",)
    reference = long_plain[0] if device == "cpu" else undisturbed(tmp_path, LONG, on_device)
    chaos = Chaos(tmp_path, LONG, settings=on_device, processes=2, dawdles=True)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 1)
    for phase in ("forward", "optimizer", "ready", "applying", "evaluation", "after-step"):
        chaos.meet(f"kill-{phase}")
    assert chaos.finish() == 0, chaos.text()
    assert "Starting again" not in chaos.text() and "Traceback" not in chaos.text()
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []


def spare_waits(chaos):
    """Whether there is one that has loaded everything: it uses hardly any processor time, and the others do."""
    before = {process: sum(process.cpu_times()[:2]) for process in chaos.workers()}
    time.sleep(0.5)
    busy = [process for process, seconds in before.items() if sum(process.cpu_times()[:2]) - seconds > 0.1]
    return (len(before), len(busy)) == (chaos.processes + chaos.spares, chaos.processes)


def test_spares_take_the_place_of_lost_processes(tmp_path, plain):
    chaos = Chaos(tmp_path, SHORT, spares=1)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 4)
    for fault in ("kill-forward", "stop-shared-memory", "kill-writing"):
        wait_until(lambda: spare_waits(chaos))
        chaos.meet(fault)
    assert chaos.process.wait(200) == 0, chaos.text()
    told = summary(tmp_path, "live")["regrouped"]
    assert [(len(each["losses"]), each["joined"], each["world_size"]) for each in told] == [(1, 1, 3)] * 3
    assert differences(final_state(tmp_path / "runs" / "live"), plain) == []


@pytest.mark.matrix
def test_all_but_one_and_then_all(tmp_path, plain):
    """Where nobody is left the run starts again from its newest checkpoint."""
    (tmp_path / "c.yaml").write_text(SHORT)
    run = started(tmp_path, "train", "c.yaml", *LIVE, "checkpoint.every_steps=5")
    wait_for_steps(tmp_path / "runs" / "live", 4)
    for process in workers(run)[1:]:
        process.kill()
    wait_for_steps(tmp_path / "runs" / "live", 20)
    for process in workers(run):
        process.kill()
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0, output
    assert "Starting again on 3 processes from step-" in output
    assert summary(tmp_path, "live")["digest"] == plain[0]


@pytest.mark.matrix
def test_a_lock_that_outlives_its_process(tmp_path, plain):
    """As on a file system of several machines, one of which is lost."""
    (tmp_path / "c.yaml").write_text(SHORT)
    run = started(tmp_path, "train", "c.yaml", *LIVE)
    wait_for_steps(tmp_path / "runs" / "live", 4)
    held = FileLock(tmp_path / "runs" / "live" / ".lock")
    threading.Thread(target=held.acquire, kwargs={"poll_interval": 0.001}, daemon=True).start()
    workers(run)[0].kill()
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0 and "is still locked by the lost rank 0" in output, output
    assert summary(tmp_path, "live")["digest"] == plain[0]
    held.release(force=True)


def test_resized(tmp_path, plain):
    (tmp_path / "c.yaml").write_text(SHORT)
    run = started(tmp_path, "train", "c.yaml", *LIVE, "launch.processes=1")
    wait_for_steps(tmp_path / "runs" / "live", 2)
    done = lockstep(tmp_path, "resize", "runs/live", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "live goes on with 3 processes after one of the next steps\n"
    wait_until(lambda: len(workers(run)) == 3)
    wait_for_steps(tmp_path / "runs" / "live", 8)
    assert lockstep(tmp_path, "resize", "runs/live", "2").returncode == 0
    output, _ = run.communicate(timeout=90)
    assert run.returncode == 0, output
    sizes = [each["world_size"] for each in summary(tmp_path, "live")["regrouped"]]
    assert (max(sizes), sizes[-1]) == (3, 2) and "killed" not in output
    assert differences(final_state(tmp_path / "runs" / "live"), plain) == []
    assert lockstep(tmp_path, "resize", "runs/live", "2").stderr == (
        "live has ended: start it with launch.processes=2\n"
    )


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_stopped_by_a_signal_and_resumed(tmp_path, plain):
    """Also with a spare, which does not wait for the end of anything."""
    (tmp_path / "c.yaml").write_text(SHORT)
    run = started(tmp_path, "train", "c.yaml", *LIVE, "launch.spares=1")
    wait_for_steps(tmp_path / "runs" / "live", 4)
    workers(run)[0].kill()
    wait_for_steps(tmp_path / "runs" / "live", 12)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 75 and "stopped by a signal after step" in output, output
    assert lockstep(tmp_path, "train", "c.yaml", *LIVE).returncode == 0
    assert summary(tmp_path, "live")["digest"] == plain[0]


@pytest.mark.matrix
def test_stopped_by_a_signal_while_processes_are_lost(tmp_path, plain):
    """One is dead, another is stopped in the middle of the recovery: the one that is left saves, once it is alone."""
    chaos = Chaos(tmp_path, SHORT)
    chaos.start()
    wait_for_steps(tmp_path / "runs" / "live", 4)
    taken = [chaos.order("kill", "forward"), chaos.order("stop", "rendezvous")]
    chaos.wait(lambda: all(map(chaos.is_taken, taken)), "both")
    chaos.process.send_signal(signal.SIGTERM)
    assert chaos.process.wait(60) == 75 and "stopped by a signal after step" in chaos.text(), chaos.text()
    assert lockstep(tmp_path, "train", "c.yaml", *LIVE).returncode == 0
    assert summary(tmp_path, "live")["digest"] == plain[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.kind=fsdp"], "launch.recovery: live needs a second copy of the state, and parallel.kind=fsdp"),
        (["launch.recovery=restart", "launch.spares=1"], "spares=1 is for recovery: live, in which a spare takes"),
        (["launch.spares=100"], "launch.spares=100 on the "),
        (["train.batchnorm=sync"], "live changes the number of processes, on which train.batchnorm=sync depends"),
    ],
)
def test_what_cannot_recover_live_is_refused(tmp_path, settings, words):
    (tmp_path / "c.yaml").write_text(SHORT)
    done = lockstep(tmp_path, "train", "c.yaml", *LIVE, *settings)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_resizing_needs_live_recovery(tmp_path):
    (tmp_path / "c.yaml").write_text(SHORT)
    words = ["train", "c.yaml", "train.steps=2", "run.name=a", "launch.recovery=restart"]
    assert lockstep(tmp_path, *words).returncode == 0
    done = lockstep(tmp_path, "resize", "runs/a", "2")
    assert done.returncode == 2 and "a does not recover live (launch.recovery): cancel it" in done.stderr


def test_the_events_of_a_step_are_kept_together():
    """A rank that takes over cuts the files after the last step that it knows nothing of."""
    backlog = Backlog(seconds=0.1)
    for step in (55, 60):
        backlog.notice(StepDone(step=step, epoch=1, values={"loss": 1.0}))
    time.sleep(0.2)
    evaluated = Evaluated(step=60, epoch=1, samples=1, values={})
    backlog.notice(evaluated)
    backlog.notice(StepDone(step=65, epoch=1, values={"loss": 1.0}))
    assert [(type(event), event.step) for event in backlog.events] == [(StepDone, 60), (Evaluated, 60), (StepDone, 65)]
    assert backlog.first_step == 60 and backlog.missed(backlog.plain()) == []
    assert Backlog().missed(backlog.plain()) == backlog.events


def test_formations_are_plain_text():
    positions = (Position(step=3, settled=2), Position())
    formation = Formation(version=4, generation=2, members=("0.1", "1.2"), positions=positions, losses=("rank 1",))
    assert FORMATION.validate_json(to_json(formation)) == formation
    assert max(positions) == positions[0] and Position(step=3, settled=3) > positions[0]


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_random_faults(tmp_path, long_plain):
    chaos = Chaos(tmp_path, LONG, seed=1, dawdles=True)
    assert chaos.run(faults=4, pause_seconds=0.3) == 0, (tmp_path / "output.txt").read_text()
    assert sum(chaos.counts.values()) >= 4, "the run is over too early"
    assert differences(final_state(tmp_path / "runs" / "live"), long_plain[0]) == []


@pytest.fixture(scope="module", params=[MNIST, TEXTS], ids=["mnist", "texts"])
def work(request, tmp_path_factory, data_folder, minilm):
    """A config, and the final state of its run, undisturbed on one process."""
    config = request.param.replace("DATA", str(data_folder)).replace("MINILM", str(minilm))
    return config, undisturbed(tmp_path_factory.mktemp("plain"), config)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("spares", [0, 1])
def test_chaos(tmp_path, work, spares, capsys):
    """75 faults each; prints the table of faults by kind and phase."""
    (config, reference), began = work, time.monotonic()
    chaos = Chaos(tmp_path, config, seed=spares, spares=spares)
    code = chaos.run(faults=75, pause_seconds=1.0)
    with capsys.disabled():
        sys.stdout.write(f"\n{time.monotonic() - began:.0f} s\n{chaos.table()}\n")
    assert code == 0, (tmp_path / "output.txt").read_text()
    assert sum(chaos.counts.values()) >= 75, "the run is over too early"
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []
