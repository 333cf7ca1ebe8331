"""More ranks than any machine here could run: the real reduction on simulated ones, counted and checked."""

import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from members import further

from lockstep.core.reduction.all_reduce import AllReduce
from lockstep.core.reduction.tree import contiguous_by_rank, tree_sum
from lockstep.data.order import Order
from lockstep.data.sampler import TrainingRequests
from lockstep.launch.elastic import join_checks
from lockstep.launch.elastic.membership import Membership
from lockstep.launch.launch_config import LaunchSection
from lockstep.protocol.rendezvous import Endpoint

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
    owned = contiguous_by_rank(world, shards)
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


@pytest.mark.parametrize(("world", "shards"), [(64, 64), (96, 256), (70, 50), *further((256, 256), (200, 150))])
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


def test_a_heartbeat_costs_the_same_with_any_number_of_nodes(tmp_path):
    """On a real store. The nodes' heartbeats follow one another here; in a run each has a thread of its own."""
    section = LaunchSection(kind="local", nodes=48)
    with Membership(Endpoint(host="127.0.0.1", port=0), 0, section) as leader:
        endpoint = Endpoint(host="127.0.0.1", port=leader.store.port)
        leader.introduce(leader.store, tmp_path)

        def joined(rank):
            node = Membership(endpoint, rank, section).__enter__()
            node.store = join_checks.join(node.store, tmp_path, seconds=10)
            return node

        with ThreadPoolExecutor() as pool:
            nodes = [leader, *pool.map(joined, range(1, 48))]
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
    owned = contiguous_by_rank(512, 512)
    every = AllReduce(owned, frozenset(range(512)), Place(511, 512))
    assert every.local_nodes == ((511, 1),)


def test_a_rank_of_512_fetches_its_own_samples_only():
    order = Order(seed=0, samples=10**7, global_batch=4096, micro_batch=8)
    requests = TrainingRequests(order=order, owned=lambda *_: [7], start=10**4, stop=10**4 + 3)
    assert [len(request.indices) for request in requests] == [8, 8, 8]


COUNTED = """
import collections, json, os, sys
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch import nn

from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.distributed.collectives import Agreement
from lockstep.training.evaluation import EvaluationTarget, evaluate

MICRO_BATCHES = 64
world, folder = int(sys.argv[1]), sys.argv[2]
rank = next((rank for rank in range(1, world) if os.fork() == 0), 0)  # one import for all of them
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
calls, sent = collections.Counter(), collections.Counter()


def counting(name):
    original = getattr(c10d, name)

    def call(*arguments, **options):
        calls[name] += 1
        sent[name] += sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor))
        return original(*arguments, **options)

    setattr(c10d, name, call)
    setattr(dist, name, call)


agreement = Agreement(flags=7)
dist.barrier()
for name in ("all_reduce", "all_gather", "gather", "broadcast", "barrier", "scatter", "all_to_all"):
    counting(name)
for step in range(5):
    agreement.post([step == 3 and rank == world - 1, *[0] * 6])
    flags = agreement.read()
    assert flags[0] == (step == 3), (step, flags)
steps = dict(calls), dict(sent)
calls.clear()
sent.clear()


def micro_batch(number):
    batch = {"x": torch.full((2, 3), float(number)), "label": torch.zeros(2)}
    place = dict(step=0, shard=number, shards=MICRO_BATCHES, present=frozenset(range(MICRO_BATCHES)))
    return MicroBatch(indices=(2 * number, 2 * number + 1), batch=batch, **place)


target = EvaluationTarget(
    forward=lambda batch: batch["x"].sum(1),
    loss=lambda outputs, batch: LossSum(outputs.sum(), len(outputs)),
    metrics={},
    device=torch.device("cpu"),
)
own = [micro_batch(number) for number in range(rank, MICRO_BATCHES, world)]
result = evaluate(target, own, total=MICRO_BATCHES)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"steps": steps, "evaluation": dict(calls), "loss": result.values["loss"]}, file)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1, world)]
    sys.exit(any(codes))
os._exit(0)
"""


def counted(folder, world):
    """What each of `world` real processes counted."""
    folder.mkdir()
    command = [sys.executable, "-c", COUNTED, str(world), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def test_agreement_and_evaluation_call_no_more_collectives_on_more_ranks(tmp_path):
    """On real process groups: a step's agreement is one all-reduce of a few bytes, and an evaluation waits for the
    others once for eight micro-batches of a rank, of which there are fewer with more ranks."""
    seen = {world: counted(tmp_path / str(world), world) for world in (2, 8)}
    for world, ranks in seen.items():
        rounds = -(-64 // world // 8)
        for rank in ranks:
            assert rank["steps"] == [{"all_reduce": 5}, {"all_reduce": 5 * 7 * 8}]
            assert sum(rank["evaluation"].values()) == 4 * rounds + 4, (world, rank["evaluation"])
            assert rank["loss"] == ranks[0]["loss"] == seen[2][0]["loss"] == 3 * sum(range(64)) / 64
