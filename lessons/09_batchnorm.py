"""Lesson 9: BatchNorm on several ranks. Run: python lessons/09_batchnorm.py."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
BATCH = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0]).unsqueeze(1)  # eight samples, one feature
SHARES = BATCH.split([5, 3])  # rank 0 has five of them, rank 1 has three


def everyone(value):
    """The values of all ranks, in the order of the ranks."""
    found = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def work(rank, store):
    """Normalise this rank's share alone, then with the statistics of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    x = SHARES[rank]
    whole = torch.nn.BatchNorm1d(1)  # for comparison: one process that has all samples
    expected = whole(BATCH).split([5, 3])[rank]

    # 1. An ordinary BatchNorm sees the samples of its own rank only.
    layer = torch.nn.BatchNorm1d(1, momentum=1.0)  # momentum 1: the running mean is the mean of the last batch
    output = layer(x)
    means = everyone(layer.running_mean.item())
    assert means[0] != means[1] and not torch.allclose(output, expected)

    # 2. Mean and variance of the whole batch, from three sums. Sums can be added over ranks; variances cannot.
    sums = torch.stack([x.double().sum(), (x.double() ** 2).sum(), torch.tensor(float(len(x))).double()])
    dist.all_reduce(sums)
    total, squares, count = sums
    mean = total / count
    variance = squares / count - mean**2  # in float64: this difference cancels digits
    by_hand = (x - mean) / torch.sqrt(variance + layer.eps)
    assert torch.isclose(mean, BATCH.double().mean())
    assert torch.isclose(variance, BATCH.double().var(correction=0))
    assert torch.allclose(by_hand.float(), expected, atol=1e-6), "not the output of the whole batch"

    locally, together = everyone(output[0].item()), everyone(by_hand[0].item())
    if rank == 0:
        for one in range(WORLD):
            print(f"rank {one}: {len(SHARES[one])} samples, local mean {means[one]:.3f}, ", end="")
            print(f"first output {locally[one]:.3f} by local, {together[one]:.3f} by common statistics")
        print(f"all ranks: {count:.0f} samples, mean {mean:.3f}, variance {variance:.3f}: those of the whole batch")
        print(f"the mean of the local means is {sum(means) / WORLD:.3f}: wrong, the shares are not equally large")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"{folder}/store",), nprocs=WORLD)
