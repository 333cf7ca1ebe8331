"""Gradients of large embeddings by row: the bits of whole gradients, and no more than the rows that were read."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from strategy_runs import CPU
from torch import nn

from lockstep.base import plugins
from lockstep.base.model_contracts import LossSum, MicroBatch
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, seed_all
from lockstep.core.reduction.gradient_norm import average_, gradients
from lockstep.parallel import embedding_rows
from lockstep.parallel.embedding_rows import LARGE, RowSum, large_embeddings, row_sum

ROWS, WIDTH, SHARDS = 97, 12, 5


class Texts(nn.Module):
    """`kind` says what else uses the embedding."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.head = nn.Linear(WIDTH, 3)
        if kind == "tied":
            self.head = nn.Linear(WIDTH, ROWS, bias=False)
            self.head.weight = self.embedding.weight

    def forward(self, batch):
        found = self.embedding(batch["tokens"])
        found *= 1.5  # in place
        if self.kind == "twice":
            found = found + self.embedding(input=batch["tokens"].flip(0)).sin()
        found = found.mean(1)
        if self.kind == "as weights":
            found = found + F.linear(found, self.embedding.weight).tanh().mean(1, keepdim=True)
        return self.head(found)

    def loss(self, outputs, batch):
        return LossSum(F.cross_entropy(outputs, batch["label"], reduction="sum"), torch.tensor(len(outputs)))

    def blocks(self):
        return [self.head]


def micro_batches(step, owned):
    for shard in owned(SHARDS, frozenset(range(SHARDS))):
        seed_all(1000 * step + (shard or 0))
        batch = {"tokens": torch.randint(0, ROWS // 3, (4, 7)), "label": torch.randint(0, 3, (4,))}
        yield MicroBatch(
            step=step,
            shard=shard or 0,
            indices=(0, 1, 2, 3),
            batch=batch,
            ghost=shard is None,
            shards=SHARDS,
            present=frozenset(range(SHARDS)),
        )


@contextmanager
def large_from(elements):
    """Embeddings of so many elements are large, until the end: the process serves other tests as well."""
    before, embedding_rows.LARGE = embedding_rows.LARGE, elements
    try:
        yield
    finally:
        embedding_rows.LARGE = before


def trained(kind, strategy, large, *, exact=True):
    """Three steps of SGD -> after each, the gradients' norm and the weights; and whether rows were used."""
    seed_all(5)
    model, precision = Texts(kind), Precision("fp32", CPU)
    module = plugins.implementation("parallel.strategies", strategy)
    config = module.Config(kind=strategy)
    spread = module.build(config, randomness=Randomness(0), precision=precision, exact=exact)
    with large_from(large):
        held = spread.place(model, lambda: next(micro_batches(0, lambda *_: [0])).batch)
    found, by_row = [], False
    for step in range(3):
        loss = spread.forward_backward(list(micro_batches(step, spread.owned)))
        by_row = by_row or bool(spread.touched_rows)
        grads = gradients(list(held.parameters()))
        norm = average_(grads, spread.norm(), count=loss.count, max_norm=0.1, touched_rows=spread.touched_rows)
        with torch.no_grad():
            for parameter in held.parameters():
                parameter -= 0.3 * parameter.grad
                parameter.grad = None
        whole = {name: tensor.detach().clone() for name, tensor in spread.state().items()}
        found.append((norm, whole))
    return found, by_row


@pytest.mark.parametrize("kind", ["once", "twice", "as weights", "tied"])
@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2), ("ddp", 4)])
def test_bits_are_those_of_whole_gradients(ranks, kind, strategy, world):
    """An embedding may be called several times, and its weights used by other code."""
    ((expected, by_row),) = ranks(1, trained, kind, "single", 10**9)
    assert not by_row
    for found, by_row in ranks(world, trained, kind, strategy, 1):
        assert by_row == (kind != "tied")
        for (norm, weights), (other_norm, others) in zip(found, expected, strict=True):
            assert torch.equal(norm, other_norm)
            assert all(torch.equal(weights[name], others[name]) for name in others), kind


def test_the_backends_own_sum_is_nearly_the_same(ranks):
    ((expected, _),) = ranks(1, trained, "twice", "single", 10**9)
    for found, by_row in ranks(2, trained_fast, "twice"):
        assert by_row
        assert torch.allclose(found[-1][1]["embedding.weight"], expected[-1][1]["embedding.weight"], atol=1e-6)


def trained_fast(kind):
    return trained(kind, "ddp", 1, exact=False)


def sent_bytes_on_rank(large):
    """What a rank sends in the point-to-point exchange of a step, and the size of the embedding."""
    sent, send = [0], dist.isend
    dist.isend = lambda tensor, *args, **kwargs: (
        sent.__setitem__(0, sent[0] + tensor.nbytes) or send(tensor, *args, **kwargs)
    )
    try:
        trained("once", "ddp", large)
    finally:
        dist.isend = send
    return sent[0]


def test_only_rows_that_were_read_travel(ranks):
    third = ROWS // 3
    for sent in ranks(2, sent_bytes_on_rank, 1):
        assert 0 < sent <= 3 * 3 * third * WIDTH * 4  # three steps; at most the two nodes of a rank, and the result


def test_what_is_not_plain_is_left_to_autograd():
    many = LARGE // 4
    plain, sparse, frozen, small = (nn.Embedding(many, 4) for _ in range(4))
    sparse.sparse = True
    frozen.weight.requires_grad_(False)
    small.weight = nn.Parameter(torch.zeros(3, 4))
    hooked, bounded = nn.Embedding(many, 4), nn.Embedding(many, 4, max_norm=1.0)
    hooked.weight.register_hook(lambda gradient: gradient)
    elsewhere = nn.Embedding(many, 4, device="meta")
    model = nn.ModuleList([plain, sparse, frozen, small, hooked, bounded, elsewhere])
    assert large_embeddings(model) == [plain]
    assert large_embeddings(nn.ModuleList([plain])) == []
    other = nn.Embedding(many, 4)
    other.weight = plain.weight
    assert large_embeddings(nn.ModuleList([plain, nn.Linear(2, 2), other])) == []


def test_rows_add_like_whole_gradients():
    tokens = torch.tensor([[3, 1, 3], [0, 1, 9]])
    gradients_of = torch.randn(2, 3, 4)
    whole = torch.ops.aten.embedding_dense_backward(gradients_of, tokens, 10, 1, False)
    found = row_sum(tokens, gradients_of, 1)
    assert found.rows.tolist() == [0, 1, 3, 9]
    assert torch.equal(whole[found.rows], found.values)
    total = found.add_(RowSum(torch.tensor([1, 5]), torch.ones(2, 4)))
    assert total.rows.tolist() == [0, 1, 3, 5, 9]
    assert torch.equal(total.values[1], torch.ones(4)) and torch.equal(total.values[3], torch.ones(4))
