"""Tensor parallelism: the weights of one process to a stated tolerance, the same bits on every rank."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.base import plugins
from lockstep.base.contracts import DataSpec
from lockstep.base.errors import LockstepError, ModelError
from lockstep.base.model_contracts import LossSum, MicroBatch, Model, TensorPlan
from lockstep.checkpoint import reader
from lockstep.checkpoint.layout import Manifest, folder_of, read_manifest
from lockstep.checkpoint.writer import Writer
from lockstep.core.distributed.process_group import world_group
from lockstep.core.numerics.digest import digest, digest_of, world_lines
from lockstep.core.numerics.precision import Precision
from lockstep.core.numerics.seeds import Randomness, seed_all
from lockstep.models import _transformer as transformer
from lockstep.parallel.tensor_plan import is_split, planned, splittable
from lockstep.training import optim
from lockstep.training.optim import initialise, rules_of
from lockstep.training.optim_config import OptimSection
from lockstep.training.state import TrainState
from lockstep.training.step import step

CPU = torch.device("cpu")
LABELS = ("World", "Sports", "Business", "Sci/Tech")
VOCABULARY, SHARDS = 101, 5
"""101 is prime, so that the embedding's rows are split unevenly."""


def saved(folder, kind="Llama", **settings):
    """A tiny model with random weights, in a folder as transformers writes it."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "initializer_range": 0.1,
        **settings,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    seed_all(7)
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"))


def micro_batches(number, owned):
    """Texts of different lengths, by shard; the fourth step holds one shard only, so that a second replica has none."""
    present = frozenset(range(1 if number == 3 else SHARDS))
    for mine in owned(SHARDS, present):
        shard = min(present) if mine is None else mine
        generator = np.random.default_rng([number, shard])
        tokens = torch.tensor(generator.integers(1, VOCABULARY, (3, 9)))
        mask = torch.arange(9) < torch.tensor(generator.integers(3, 10, (3, 1)))
        batch = {
            "input_ids": tokens * mask,
            "attention_mask": mask.long(),
            "label": torch.tensor(generator.integers(0, len(LABELS), 3)),
        }
        yield MicroBatch(
            step=number, shard=shard, indices=(0, 1, 2), batch=batch, ghost=mine is None, shards=SHARDS, present=present
        )


def sample():
    return next(iter(micro_batches(0, lambda *_: [0]))).batch


def placed(folder, kind, options=None):
    options = options or {}
    seed_all(0)
    spec = DataSpec(modality="text", labels=LABELS)
    model = transformer.build(transformer.Config(kind="transformer", name=str(folder)), spec)
    randomness, precision = Randomness(3), Precision(options.get("precision", "fp32"), CPU)
    randomness.watch(model.blocks(), recompute=options.get("recompute", False))
    module = plugins.implementation("parallel.strategies", kind)
    config = module.Config(kind=kind, **options.get("config", {}) if kind == "tensor" else {})
    strategy = module.build(config, randomness=randomness, precision=precision, exact=True)
    section = OptimSection(kind=options.get("optim", "adamw"))
    rules = rules_of(section, model)
    held = strategy.place(model.train(), sample)
    optimizer = optim.build(section, held, rules)
    initialise(held, optimizer)
    return TrainState(strategy=strategy, module=held, optimizer=optimizer, precision=precision, rate=lambda _: 1e-3)


def whole(tensors):
    """Every tensor, whole, on every rank."""
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def trained_on_rank(folder, kind, steps, options):
    """The first step's gradients and norm, the losses of all steps, and the weights after them."""
    state = placed(folder, kind, options)
    strategy = state.strategy
    strategy.forward_backward(list(micro_batches(0, strategy.owned)))
    parts = {name: p.grad for name, p in state.module.named_parameters()}
    gradients = whole({name: strategy.sharded(name, grad) for name, grad in parts.items()})
    norm = strategy.norm()
    state.optimizer.zero_grad(set_to_none=True)
    losses = []
    for number in range(steps):
        outcome = step(state, list(micro_batches(number, strategy.owned)), clip=1.0)
        losses.append([float(outcome.loss.total), int(outcome.loss.count), float(outcome.norm)])
    return gradients, float(norm), losses, whole(strategy.state())


def apart(mine, theirs):
    """The largest difference of any number of any tensor, in units of that tensor's largest number."""
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[n].float() - theirs[n].float()).abs().max() / theirs[n].float().abs().max().clamp(min=1e-30))
        for n in theirs
    )


def check(ranks, folder, options, *, worlds, limits):
    """Gradients, loss, norm and weights of four steps against one process; every rank the same bits, whatever the
    number of replicas."""
    ((gradients, norm, losses, weights),) = ranks(1, trained_on_rank, folder, "single", 4, options)
    bits = []
    for world in worlds:
        for found in ranks(world, trained_on_rank, folder, "tensor", 4, {"config": {"size": 2}, **options}):
            of_gradients, of_sums, of_weights = limits
            assert apart(found[0], gradients) < of_gradients
            assert found[1] == pytest.approx(norm, rel=of_sums)
            np.testing.assert_allclose(found[2], losses, rtol=of_sums)
            assert [count for _, count, _ in found[2]] == [count for _, count, _ in losses]
            assert apart(found[3], weights) < of_weights
            bits.append(found)
    for found in bits:
        assert found[1:3] == bits[0][1:3]
        for mine, theirs in ((found[0], bits[0][0]), (found[3], bits[0][3])):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_weights_are_those_of_one_process_to_the_last_bits(ranks, llama):
    """With SGD: AdamW makes whole steps of gradients that are zero but for rounding."""
    check(ranks, llama, {"optim": "sgd"}, worlds=(2, 4), limits=(3e-6, 1e-6, 3e-7))


def test_what_is_not_split_drops_out_as_one_process_does(ranks, tmp_path):
    """Biases, and dropout on activations that all ranks hold. Measured: gradients 5e-7, loss and norm 1e-7, weights
    7e-7. With SGD: a key's bias has no gradient but for rounding, of which AdamW makes whole steps (4e-2)."""
    settings = {"hidden_dropout": 0.3, "hidden_act": "gelu", "max_position_embeddings": 32}
    folder = saved(tmp_path, "GPTNeoX", **settings)
    check(ranks, folder, {"optim": "sgd"}, worlds=(2,), limits=(3e-6, 1e-6, 3e-6))


@pytest.mark.matrix
def test_norms_of_heads_recomputation_and_bf16(ranks, tmp_path):
    """Qwen3's norms are whole on every rank, which uses them for its own heads. Measured: gradients
    1.3e-6, loss and norm 2e-7, weights 7e-6; in bf16 2e-2, 2e-3 and 1.1e-2."""
    folder = saved(tmp_path, "Qwen3", head_dim=16)
    check(ranks, folder, {"recompute": True}, worlds=(2,), limits=(3e-6, 1e-6, 6e-5))
    check(ranks, folder, {"precision": "bf16"}, worlds=(2,), limits=(5e-2, 6e-3, 3e-2))


def save_on_rank(folder, kind, root):
    """Train a step, save -> the weights, whole, and the digest of the live ones."""
    state = placed(folder, kind)
    step(state, list(micro_batches(0, state.strategy.owned)), clip=1.0)
    writer = Writer(root, copies=state.strategy.copies)
    manifest = Manifest(step=1, epoch=0, world_size=1, saved_at=time.time(), numeric={}, progress=state.state_dict())
    writer.start(state.tensors(), manifest)
    saved = writer.finished()
    assert saved.failure is None, saved.failure
    return whole(state.tensors()), digest_of(world_lines(state.strategy.state(), world_group()))


def load_on_rank(folder, kind, root):
    """Read a save into another strategy -> all its tensors, whole, and the next step's loss."""
    state = placed(folder, kind)
    reader.load(folder_of(root, 1), state.tensors())
    found = whole(state.tensors())
    return found, float(step(state, list(micro_batches(1, state.strategy.owned)), clip=1.0).loss.total)


@pytest.mark.parametrize(("kind", "world", "other", "into"), [("tensor", 2, "single", 1), ("single", 1, "tensor", 2)])
def test_checkpoints_go_from_one_strategy_to_another(ranks, llama, tmp_path, kind, world, other, into):
    saves = ranks(world, save_on_rank, llama, kind, tmp_path)
    manifest = read_manifest(folder_of(tmp_path, 1))
    ((same, own_loss), *_) = ranks(world, load_on_rank, llama, kind, tmp_path)
    for found, loss in ranks(into, load_on_rank, llama, other, tmp_path):
        assert loss == pytest.approx(own_loss, rel=1e-6)
        for expected, live in saves:
            assert live == manifest.digest
            assert found.keys() == expected.keys() == same.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
        weights = {n.removeprefix("model."): t for n, t in found.items() if n.startswith("model.")}
        assert digest(weights) == manifest.digest


def evaluated_on_rank(folder, kind, numbers):
    """Outputs for the batches that are this rank's, of different sizes."""
    state = placed(folder, kind)
    state.module.eval()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = [next(iter(micro_batches(number, lambda *_: [0]))).batch for number in numbers]
    batches = [{name: column[: 1 + place % 3] for name, column in batch.items()} for place, batch in enumerate(batches)]
    return [state.strategy.forward(batch) for batch in batches[rank::size]]


def test_every_rank_evaluates_batches_of_its_own(ranks, llama):
    (expected,) = ranks(1, evaluated_on_rank, llama, "single", range(4))
    found = ranks(2, evaluated_on_rank, llama, "tensor", range(4))
    for rank, outputs in enumerate(found):
        for mine, theirs in zip(outputs, expected[rank::2], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def refusal_on_rank(folder, options):
    try:
        placed(folder, "tensor", options)
    except LockstepError as error:
        return str(error), error.is_shared
    return None


def test_what_cannot_be_split_says_how_to_mend_it(ranks, llama, minilm, tmp_path):
    heads = saved(tmp_path / "heads", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    dropping = saved(tmp_path / "dropping", attention_dropout=0.1)
    experts = saved(tmp_path / "experts", "Mixtral", num_local_experts=2)
    cases = [
        (minilm, {}, "such as Llama, Qwen2 or Mistral"),
        (llama, {"config": {"size": 3}}, "does not divide the 2 processes: set launch.processes to a multiple of 3"),
        (heads, {}, "does not divide the 3 attention heads of this model: set parallel.size to 1"),
        (dropping, {}, "set attention_dropout"),
        (experts, {}, "moe_tp_experts"),
    ]
    for folder, options, mend in cases:
        for message, is_shared in ranks(2, refusal_on_rank, folder, options):
            assert mend in message
            assert is_shared, message


class Tied(Model):
    """Two names of one weight, of which a plan splits one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, batch):
        return self.two(self.one(batch["x"]))

    def loss(self, outputs, batch):
        return LossSum(outputs.sum(), len(outputs))

    def blocks(self):
        return [self.one, self.two]

    def tensor_plan(self):
        return TensorPlan(styles={"one": "colwise"})


def test_plans_that_do_not_fit_the_weights():
    with pytest.raises(ModelError, match=r"one\.weight and two\.weight are one tensor.*tie_word_embeddings"):
        planned(Tied(), 2, 2)
    model = Tied()
    model.two.weight = nn.Parameter(model.one.weight.detach().clone())
    assert planned(model, 2, 2) == {"one": "colwise"}
    with pytest.raises(
        ModelError, match=r"size=4 does not divide the 6 out_features of one.*set parallel.size to 1 or 2"
    ):
        planned(model, 4, 4)


def test_settings_say_what_they_change():
    module = plugins.implementation("parallel.strategies", "tensor")
    assert module.Config(kind="tensor", size=2).numeric(4) == {"kind": "tensor", "size": 2}
    assert module.Config(kind="tensor").numeric(4) == {"kind": "tensor", "size": 4}
    assert "number of processes" in module.Config(kind="tensor").breaks_reproducibility


def test_an_overflow_is_everybodys(ranks, llama):
    """fp16: where scaled gradients overflow, on whichever rank, all leave the step out, as one process does."""
    ((_, _, expected, weights),) = ranks(1, trained_on_rank, llama, "single", 4, {"precision": "fp16"})
    left_out = [not np.isfinite(norm) for _, _, norm in expected]
    assert any(left_out)
    for _, _, losses, found in ranks(2, trained_on_rank, llama, "tensor", 4, {"precision": "fp16"}):
        assert [not np.isfinite(norm) for _, _, norm in losses] == left_out
        assert apart(found, weights) < 3e-2


def split_there(folder):
    """The parameters that tensor parallelism really splits, and those that are told beforehand to be."""
    state = placed(folder, "tensor")
    names = {name for name, tensor in state.strategy.state().items() if is_split(tensor)}
    model = transformer.build(
        transformer.Config(kind="transformer", name=str(folder)), DataSpec(modality="text", labels=LABELS)
    )
    return names, splittable(model)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_what_is_split_is_known_beforehand(ranks, tmp_path, kind):
    """`estimate` forecasts by it."""
    for names, (split, counts) in ranks(2, split_there, saved(tmp_path, kind)):
        assert names == split and len(split) > 12
        assert counts["attention heads"] == 4 and counts["key/value heads"] == 2
