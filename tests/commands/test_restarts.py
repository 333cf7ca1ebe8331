"""The launcher on its own, with small processes that die in every way: what it says, and when it starts again."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from lockstep.base.contracts import Plan
from lockstep.launch.elastic.failure import LESS_MEMORY
from lockstep.launch.launchers._local import Config, Local

pytestmark = [  # the agent, in this process, leaves its children's logs open until they are collected
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PREFACE = """
import ctypes, json, os, signal, sys, time
from pathlib import Path

rank, folder = int(os.environ["RANK"]), Path(os.environ["LOCKSTEP_TEST_FOLDER"])
with (folder / f"starts-{rank}").open("a") as file:
    file.write(f"{os.environ['WORLD_SIZE']}\\n")
start = len((folder / f"starts-{rank}").read_text().splitlines())
files = [folder / f"starts-{each}" for each in range(int(os.environ["WORLD_SIZE"]))]
while any(not file.exists() or len(file.read_text().splitlines()) < start for file in files):
    time.sleep(0.01)  # nobody dies before all have started


def checkpoint(step):
    made = folder / "checkpoints" / f"step-{step:09}"
    made.mkdir(parents=True)
    (made / "manifest.json").touch()


def told(message):
    facts = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": facts}))
    sys.exit(1)


def wait():
    time.sleep(60)

"""
DIED = {
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed (SIGKILL: kill -9, or a scheduler)",
    "ctypes.string_at(0)": "crashed in native code (SIGSEGV: a segmentation fault)",
    "os.abort()": "crashed in native code (SIGABRT: abort)",
    "sys.exit(7)": "ended with exit code 7",
    "raise ValueError('torn page')": "failed with an exception (exit code 1)",
    "told('OutOfMemoryError: CUDA out of memory')": f"ran out of memory (exit code 1): {LESS_MEMORY}",
}
CODES = {"os.kill": 128 + 9, "ctypes.string_at": 128 + 11, "os.abort": 128 + 6, "sys.exit": 7, "raise ValueError": 1}
CODES["told"] = 1


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a script on each rank -> exit code, what was said, and the world of each start."""
    monkeypatch.setenv("LOCKSTEP_TEST_FOLDER", str(tmp_path))

    def launch(script, processes=2, arguments=(), multiple=1, **config):
        for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):  # the launcher sets them
            monkeypatch.setenv(name, "")
        launcher = Local(Config(kind="local", **config), threads=1, shards=8)
        argv = (sys.executable, "-c", PREFACE + script, *arguments)
        plan = Plan(argv=argv, processes=processes, process_multiple=multiple)
        code = launcher.run(plan, tmp_path / "logs")
        starts = [int(line) for line in (tmp_path / "starts-0").read_text().split()]
        return code, capfd.readouterr().err, starts

    return launch


@pytest.mark.parametrize("death", DIED)
def test_ways_to_die_are_told_apart(run, death):
    code, said, starts = run(
        f"if rank == 1:\n    print('almost done', file=sys.stderr)\n    {death}\nwait()", max_restarts=0
    )
    assert code == CODES[death.partition("(")[0]]
    assert f"{DIED[death]}\n" in said
    assert said.startswith("rank 1 (process ")
    assert "  | almost done" in said
    assert ("torn page" in said) == ("torn page" in death)
    assert "The other processes were ended too.\n" in said
    assert starts == [2]


def test_a_lost_process_is_started_again_with_all_others(run):
    script = (
        "if start < 3 and rank == 1:\n    checkpoint(start)\n    os.kill(os.getpid(), 9)\nif start < 3:\n    wait()"
    )
    code, said, starts = run(script)
    assert (code, starts) == (0, [2, 2, 2])
    assert "Starting again on 2 processes from step-000000001 (restart 1 of 3).\n" in said
    assert "Starting again on 2 processes from step-000000002 (restart 2 of 3).\n" in said


@pytest.mark.parametrize("how", ["never", "runs/other", "auto"])
def test_a_restart_goes_on_whatever_the_first_start_was_told(run, how):
    script = (
        f"assert sys.argv[1:5] == ['--resume', {how!r} if start == 1 else 'auto', '--began', sys.argv[4]], sys.argv\n"
    )
    script += "if start == 1:\n    checkpoint(1)\n    os.kill(os.getpid(), 9)"
    assert run(script, processes=1, arguments=("--resume", how))[::2] == (0, [1, 1])


def test_restarts_are_counted(run):
    code, said, starts = run("checkpoint(start)\nos.kill(os.getpid(), 9)", processes=1, max_restarts=2)
    assert code == 128 + 9
    assert starts == [1, 1, 1]
    assert "It is not started again after 2 restarts (launch.max_restarts).\n" in said
    assert "The other processes" not in said
    assert "Go on from step-000000003 with: lockstep train " in said


@pytest.mark.parametrize(("fewest", "worlds"), [(1, [3, 3, 2, 1]), (2, [3, 3, 2, 2]), (3, [3, 3, 3, 3])])
def test_one_process_fewer_when_one_cannot_come_back(run, fewest, worlds):
    """It is lost again and again before the first checkpoint."""
    code, said, starts = run("if rank == 0:\n    os.kill(os.getpid(), 9)\nwait()", processes=3, min_processes=fewest)
    assert code == 128 + 9
    assert starts == worlds
    assert f"Starting again on {worlds[-1]} process" in said


@pytest.mark.parametrize(("multiple", "worlds"), [(2, [4, 4, 2, 2]), (0, [4, 4, 4, 4])])
def test_fewer_processes_are_a_number_that_the_strategy_can_take(run, multiple, worlds):
    code, _, starts = run("if rank == 0:\n    os.kill(os.getpid(), 9)\nwait()", processes=4, multiple=multiple)
    assert (code, starts) == (128 + 9, worlds)


def test_one_process_fewer_with_live_recovery_where_it_is_lost_before_the_others_train(run):
    script = "if rank == 0:\n    os.kill(os.getpid(), 9)\ntime.sleep(0.5)\nsys.exit(5)"  # as those that have lost it
    code, said, starts = run(script, processes=3, recovery="live")
    assert (code, starts) == (128 + 9, [3, 3, 2, 1])
    assert "Starting again on 1 process" in said


@pytest.mark.parametrize("code", [2, 3, 4, 75])
def test_what_would_happen_again_is_not_tried_again(run, code):
    """A mistake in the config, a loss that is not finite, weights that came apart, an end that was asked for."""
    assert run(f"sys.exit({code})") == (code, "", [2])


def test_an_exception_is_tried_again_only_behind_a_newer_checkpoint(run):
    code, said, starts = run("if rank == 0:\n    start == 1 and checkpoint(5)\n    raise OSError('disk')\nwait()")
    assert (code, starts) == (1, [2, 2])
    assert "Starting again on 2 processes from step-000000005 (restart 1 of 3).\n" in said
    assert "It is not started again: with no checkpoint since, the same would happen at the same place.\n" in said


def test_the_cause_is_named_before_those_who_suffer_from_it(run):
    """Survivors notice first, and end with an exit code of their own."""
    script = "if rank == 2:\n    os.kill(os.getpid(), 9)\nif rank == 0:\n    sys.exit(5)\ntime.sleep(0.3)\nsys.exit(5)"
    assert "rank 2 (process " in run(script, processes=3, max_restarts=0)[1].splitlines()[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_watching_thread_found_is_repeated_where_the_terminal_has_not_seen_it(run, rank):
    verdict = json.dumps({"rank": rank, "text": "rank 0 waits for Godot"})
    script = f"(folder / 'logs' / 'verdict.json').write_text({verdict!r})\nrank != {rank} and time.sleep(1)\nsys.exit(6 if rank == {rank} else 5)"
    code, said, _ = run(script, max_restarts=0)
    assert code == 6
    assert ("rank 0 waits for Godot\n" in said) == (rank == 1)


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="a control group for memory cannot be made here")
def test_a_process_that_the_kernel_kills_for_want_of_memory(run):
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group = MEMORY / own.lstrip("/") / f"lockstep-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        script = f"""
if rank == 1:
    Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
    print("growing", flush=True)
    held = [bytearray(1 << 20) for _ in range(4096)]
wait()"""
        code, said, _ = run(script, max_restarts=0)
        assert code == 128 + signal.SIGKILL
        assert "ran out of memory (SIGKILL by the kernel's out-of-memory killer)" in said
    finally:
        subprocess.run(["rmdir", str(group)], check=False)


@pytest.mark.parametrize(("step", "starts"), [("7", 2), ("start", 3)])
def test_an_exception_that_comes_again_in_its_step_is_not_tried_a_third_time(run, step, starts):
    """Though there are checkpoints in between; in another step it is another."""
    script = """
import traceback
from lockstep.base.user_code import noting_step
checkpoint(start)
try:
    with noting_step(STEP):
        raise OSError(f"disk {start}")
except OSError as error:
    facts = {"message": f"OSError: {error}", "extraInfo": {"timestamp": "1", "py_callstack": traceback.format_exc()}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": facts}))
    sys.exit(1)
"""
    code, said, found = run(script.replace("STEP", step), processes=1, max_restarts=2)
    assert (code, found) == (1, [1] * starts)
    is_again = "It is not started again: it has failed twice in the same way, at the same lines.\n" in said
    assert is_again == (starts == 2)
    assert f"Go on from step-00000000{starts} with: lockstep train " in said
