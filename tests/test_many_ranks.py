"""More ranks than any machine here could run: the real reduction on simulated ones, counted and checked."""

import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.shard_assignment import contiguous_by_rank
from lockstep.core.reduction.tree import tree_sum
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.elastic.rendezvous import Endpoint
from lockstep.launch.launch_config import LaunchSection

ELEMENTS = 4099


class Place:
    """A rank of a group that exists in this process only."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class Simulated(AllReduce):
    """The real all-reduce, whose messages go through queues between threads."""

    def connect(self, boxes, sent):
        self.boxes, self.sent = boxes, sent

    def _transfer(self, sends, receives):
        for tensor, rank in sends:
            if tensor.numel():
                self.sent[self.rank, "messages"] += 1
                self.sent[self.rank, "elements"] += tensor.numel()
                self.boxes[self.rank, rank].put(tensor.clone())
        for tensor, rank in receives:
            if tensor.numel():
                tensor.copy_(self.boxes[rank, self.rank].get(timeout=100))


def reduced(world, shards, rows, present):
    """Each rank's result, and what each of them sent."""
    owned = contiguous_by_rank(world, shards=shards, present=present)
    ranks = [Simulated(owned, present, Place(rank, world)) for rank in range(world)]
    boxes = {(a, b): queue.SimpleQueue() for a in range(world) for b in range(world)}
    sent, results = Counter(), [None] * world

    def run(each):
        partials = [tree_sum(rows, frozenset(range(a, a + n)) & present) for a, n in each.local_nodes]
        results[each.rank] = each.sum(partials or [torch.zeros(ELEMENTS)])

    threads = [threading.Thread(target=run, args=(each,)) for each in ranks]
    for each, thread in zip(ranks, threads, strict=True):
        each.connect(boxes, sent)
        thread.start()
    for thread in threads:
        thread.join()
    return results, sent, max(len(each.local_nodes) for each in ranks)


@pytest.mark.parametrize(("world", "shards"), [(64, 64), (256, 256), (96, 256), (200, 150)])
def test_every_rank_gets_the_sum_and_sends_no_more_than_a_ring_would(world, shards):
    """A ring all-reduce sends 2 (W-1) messages of n/W elements from each rank. With shards that are not a power of two
    for each rank, a rank contributes several partial sums: more bytes, whose number does not depend on W."""
    present = frozenset(range(shards)) - {3}
    rows = torch.randn(shards, ELEMENTS)
    results, sent, nodes = reduced(world, shards, rows, present)
    expected = tree_sum(rows, present)
    assert all(torch.equal(result, expected) for result in results)
    width = -(-ELEMENTS // world)
    assert max(sent[rank, "messages"] for rank in range(world)) <= (nodes + 1) * (world - 1)
    assert max(sent[rank, "elements"] for rank in range(world)) <= (nodes + 1) * (world - 1) * width
    assert nodes <= (1 if shards == world else 2 * max(1, -(-shards // world)).bit_length())


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store, self.calls = store, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._store, name)


def test_a_heartbeat_costs_the_same_with_any_number_of_nodes():
    """On a real store. The nodes' heartbeats follow one another here; in a run each has a thread of its own."""
    section = LaunchSection(kind="local", nodes=48)
    with Membership(Endpoint(host="127.0.0.1", port=0), 0, section) as leader:
        endpoint = Endpoint(host="127.0.0.1", port=leader.store.port)
        with ThreadPoolExecutor() as pool:
            others = pool.map(lambda rank: Membership(endpoint, rank, section).__enter__(), range(1, 48))
            nodes = [leader, *others]
        for each in nodes:
            each.index = each._next_index()
            each.publish(processes=8)
        leader.publish_round(members=(0,))
        for each in (*nodes[1:], leader):
            each._heartbeat(each.store)
        assert leader.present() == list(range(48)) and leader.entries[47]["node_rank"] == 47
        for each in (nodes[-1], leader):
            counted = Counting(each.store)
            each._heartbeat(counted)
            assert counted.calls.total() <= 3, counted.calls
        assert list(nodes[-1].round.members) == [0]


def test_512_ranks_have_a_plan():
    """Made once for each kind of step."""
    owned = contiguous_by_rank(512, shards=512, present=frozenset(range(512)))
    every = AllReduce(owned, frozenset(range(512)), Place(511, 512))
    assert every.local_nodes == ((511, 1),)


def test_a_rank_of_512_fetches_its_own_samples_only():
    order = Order(seed=0, samples=10**7, global_batch=4096, micro_batch=8)
    requests = TrainingRequests(order=order, owned=lambda *_: [7], start=10**4, stop=10**4 + 3)
    assert [len(request.indices) for request in requests] == [8, 8, 8]
