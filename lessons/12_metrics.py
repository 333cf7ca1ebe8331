"""Lesson 12: metrics over several ranks. Run: python lessons/12_metrics.py."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DistributedSampler

WORLD = 2
LABELS = torch.tensor([1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1])
PREDICTED = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0])  # 8 of 11 are right


def counts(indices):
    """What can be added over ranks: right answers, samples, true positives, false positives, false negatives."""
    label, predicted = LABELS[indices].bool(), PREDICTED[indices].bool()
    kinds = [label == predicted, label | True, label & predicted, ~label & predicted, label & ~predicted]
    return torch.stack(kinds).sum(1).double()


def accuracy(found):
    return (found[0] / found[1]).item()


def f1(found):
    return (2 * found[2] / (2 * found[2] + found[3] + found[4])).item()  # 2 TP / (2 TP + FP + FN)


def over_ranks(value):
    """The sum over all ranks of a number, or of each number of a list."""
    value = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(value)
    return value


def work(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    truth, own = (
        counts(list(range(11))),
        counts([list(range(8)), list(range(8, 11))][rank]),
    )  # unequal shares: 8 samples and 3
    padded = counts(list(DistributedSampler(LABELS, WORLD, rank, shuffle=False)))  # 6 and 6: sample 0 is read twice
    total, total_padded = over_ranks(own.tolist()), over_ranks(padded.tolist())
    mean_accuracy, mean_f1 = over_ranks(accuracy(own)).item() / WORLD, over_ranks(f1(own)).item() / WORLD
    assert torch.equal(total, truth)  # sums over the ranks are those of one process
    assert abs(mean_accuracy - accuracy(truth)) > 0.01 and abs(mean_f1 - f1(truth)) > 0.01
    assert total_padded[1] == 12 and accuracy(total_padded) != accuracy(truth)
    if rank == 0:
        print(f"one process:            accuracy {accuracy(truth):.3f}  F1 {f1(truth):.3f}")
        print(f"mean over the ranks:    accuracy {mean_accuracy:.3f}  F1 {mean_f1:.3f}  wrong")
        print(f"sums of counts:         accuracy {accuracy(total):.3f}  F1 {f1(total):.3f}")
        print(f"sums with padding:      accuracy {accuracy(total_padded):.3f}  F1 {f1(total_padded):.3f}  wrong")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"{folder}/store",), nprocs=WORLD)
