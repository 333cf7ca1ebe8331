"""Lesson 6: DistributedSampler. Run: python lessons/06_distributed_sampler.py."""

from torch.utils.data import DistributedSampler

WORLD = 4
SAMPLES = range(10)  # a data set of ten samples; sample i is the number i


def shares(epoch=None, **settings):
    """The indices that each rank reads in an epoch. The sampler needs no process group, only two numbers."""
    found = []
    for rank in range(WORLD):
        sampler = DistributedSampler(SAMPLES, num_replicas=WORLD, rank=rank, **settings)
        if epoch is not None:
            sampler.set_epoch(epoch)  # seed + epoch is the seed of the shuffle
        found.append(list(sampler))
    return found


def show(title, found):
    """One line for the shares of all ranks."""
    print(f"{title:28}" + "  ".join(f"rank {rank}: {share}" for rank, share in enumerate(found)))


# 1. Without shuffling, rank r reads samples r, r + 4, r + 8. Ten samples do not divide by four ranks,
#    so the sampler starts over from the beginning until all ranks have equally many.
padded = shares(shuffle=False)
show("padded", padded)
everything = sorted(sum(padded, []))
assert everything == sorted([*SAMPLES, 0, 1]), "samples 0 and 1 are read twice"
print(f"  {len(everything)} reads of {len(SAMPLES)} samples: 0 and 1 are read twice")

# 2. drop_last leaves samples out instead.
dropped = shares(shuffle=False, drop_last=True)
show("drop_last=True", dropped)
assert sorted(sum(dropped, [])) == list(range(8)), "samples 8 and 9 are never read"
print("  8 and 9 are not read")

# 3. The bug: without set_epoch the order is the same in each epoch.
one_sampler = DistributedSampler(SAMPLES, num_replicas=WORLD, rank=0, shuffle=True)
forgotten = [list(one_sampler) for epoch in range(3)]
assert forgotten[0] == forgotten[1] == forgotten[2]
for epoch, order in enumerate(forgotten):
    print(f"rank 0, no set_epoch, epoch {epoch}: {order}")

# 4. Mended: set_epoch before each epoch. All ranks shuffle alike, so the shares still fit together.
mended = [shares(epoch, shuffle=True) for epoch in range(3)]
assert mended[0] != mended[1] != mended[2] != mended[0]
for epoch, found in enumerate(mended):
    assert set(sum(found, [])) == set(SAMPLES), "together the ranks read everything"
    print(f"rank 0, set_epoch({epoch}), epoch {epoch}:  {found[0]}")
