"""Where the time of a GPU goes: streams and events are simulated here, the clock that reads them is the real one.

Simulated time passes only where a test says so: for the host in `host.spend`, for a stream in `Stream.run`.
"""

import threading

import pytest
import torch

from lockstep.core.host import phases
from lockstep.core.host.phases import PhaseClock, phase
from lockstep.core.host.stream_clock import MOST_SPANS, StreamClock, clock_of


class Host:
    """Its time, and the streams that it enqueues work on."""

    def __init__(self):
        self.now = 0.0
        self.compute, self.communication = Stream(self), Stream(self)
        self.current = self.compute

    def spend(self, seconds):
        self.now += seconds

    def synchronize(self):
        self.now = max(self.now, self.compute.free_at, self.communication.free_at)


class Stream:
    def __init__(self, host):
        self.host, self.free_at = host, 0.0

    def run(self, seconds):
        self.free_at = max(self.free_at, self.host.now) + seconds

    def wait(self, other):
        self.free_at = max(self.free_at, other.free_at)


class Event:
    def __init__(self, host):
        self.host = host

    def record(self, stream):
        self.at = max(stream.free_at, self.host.now)

    def query(self):
        return self.host.now >= self.at

    def elapsed_time(self, end):
        assert self.query() and end.query(), "CUDA refuses events that are not complete"
        return 1000 * (end.at - self.at)


@pytest.fixture
def host():
    host = Host()
    phases.start(StreamClock(host.compute, lambda: host.current, lambda: Event(host)))
    yield host
    phases.stop()


def in_autograds_thread(block):
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()


def step(host, *, data=0.0, forward=0.010, backward=0.020, peers=0.0):
    """A step of DDP: the host takes 1 ms for it, and peers send their gradients `peers` seconds after its own."""
    with phase("data"):
        host.spend(data)
    with phase("forward"):
        host.compute.run(forward)
    with phase("backward"):

        def reduce():
            host.compute.run(backward)
            host.current = host.communication
            host.communication.wait(host.compute)
            with phase("exchange"):
                host.communication.run(0.002 + peers)
            host.current = host.compute
            moments.append(phases.moment())

        moments = []
        in_autograds_thread(reduce)
        host.compute.wait(host.communication)
    phases.move_end(moments[0], "backward", "exchange")
    with phase("optimizer"):
        host.compute.run(0.003)
    host.spend(0.001)


def measured(host):
    """Milliseconds up to now, once the streams have done everything."""
    host.synchronize()
    found = phases.running().so_far()
    return {name: round(1000 * seconds, 6) for name, seconds in found.phases.items() if seconds}, found.background


def test_time_counts_where_the_stream_spends_it(host):
    """The host is done after 1 ms; the device takes 35 ms, and 100 ms more where it waits for slower processes."""
    step(host)
    assert measured(host) == ({"forward": 10, "backward": 20, "exchange": 2, "optimizer": 3}, pytest.approx(0.002))
    step(host, peers=0.1)
    found, background = measured(host)
    assert found == {"forward": 20, "backward": 40, "exchange": 104, "optimizer": 6}
    assert background == pytest.approx(0.104)


def test_loading_counts_where_the_stream_has_nothing_else_to_do(host):
    step(host)
    step(host, data=0.030)
    usual = {"forward": 20, "backward": 40, "exchange": 4, "optimizer": 6}
    assert measured(host)[0] == usual
    step(host, data=0.050)
    assert measured(host)[0] == {name: 1.5 * value for name, value in usual.items()} | {"data": 50}


def test_nothing_waits_for_the_device(host):
    """What the stream has not reached yet counts the next time."""
    clock = phases.running()
    before = host.now
    for _ in range(MOST_SPANS // 5):
        step(host)
    assert len(clock.spans) > MOST_SPANS, "the device lags behind, so no span could be read"
    behind = clock.so_far()
    assert host.now - before == pytest.approx(0.001 * (MOST_SPANS // 5))
    assert sum(behind.phases.values()) <= host.now
    assert sum(measured(host)[0].values()) / 1000 == pytest.approx(host.now)


def test_long_windows_keep_few_events(host):
    for _ in range(MOST_SPANS // 5):
        step(host)
        host.synchronize()
    assert len(phases.running().spans) <= MOST_SPANS


def test_a_wait_in_autograds_thread_is_an_exchange(host):
    """FSDP's backward pass waits on the stream that computes for weights that other processes send."""
    with phase("backward"):

        def gather():
            host.compute.run(0.010)
            with phase("exchange"):
                host.communication.run(0.050)
                host.compute.wait(host.communication)
            host.compute.run(0.010)

        in_autograds_thread(gather)
    with phase("evaluation"), phase("exchange"):
        host.compute.run(0.005)
    assert measured(host) == ({"backward": 20, "exchange": 40, "evaluation": 5}, 0.0)


def test_other_phases_of_other_threads_do_not_count(host):
    def load():
        with phase("data"):
            host.spend(0.010)

    in_autograds_thread(load)
    assert measured(host)[0] == {"other": 10}


def test_a_cpu_keeps_its_clock():
    assert type(clock_of(torch.device("cpu"))) is PhaseClock
