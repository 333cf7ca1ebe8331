"""`lockstep compare`: equal where the bits are equal, however they came about; else the first step where they diverge."""

import json
import shutil

import numpy as np
import pytest
import torch
from comparing import compare
from hypothesis import given
from hypothesis import strategies as st
from training_runs import config_in, lines, run_on_rank
from written_checkpoints import save

from lockstep.base import config
from lockstep.checkpoint import layout, reader
from lockstep.core.numerics.digest import digest
from lockstep.recipe.recipe import starter
from lockstep.tools.compare.comparison import difference, differences, ulps
from lockstep.training.step_outcomes import link

CONSTANT = {"schedule": {"shape": "constant"}, "train": {"steps": 14, "epochs": None}}


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """A folder of finished runs of 14 steps: to be copied, not touched."""
    folder = tmp_path_factory.mktemp("runs")
    ranks(1, run_on_rank, config_in(folder, "alone", parallel={"kind": "single"}, **CONSTANT))
    ranks(2, run_on_rank, config_in(folder, "two", **CONSTANT))
    ranks(1, run_on_rank, config_in(folder, "seed", run={"seed": 3}, **CONSTANT))
    ranks(1, run_on_rank, config_in(folder, "rate", optim={"lr": 0.002}, observe={"log_every": 4}, **CONSTANT))
    return folder


@pytest.fixture
def copied(runs, tmp_path):
    return shutil.copytree(runs / "two", tmp_path / "copied")


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def steps(folder, name):
    return [line for line in lines(folder, name) if line["kind"] == "step"]


# ---- equal


def test_any_number_of_processes_has_one_chain(runs):
    assert [line["chain"] for line in steps(runs, "alone")] == [line["chain"] for line in steps(runs, "two")]
    found = summary(runs / "two")
    code, out, err = compare(runs / "alone", runs / "two")
    assert (code, err) == (0, "")
    assert out == [
        f"A: {runs}/alone, 14 steps",
        f"B: {runs}/two, 14 steps",
        f"equal: 14 steps · chain {found['chain']} · digest {found['digest'][:16]}",
        "all 32 tensors of step 14 are equal",
        "recipes:",
        "  parallel.kind: 'single' in A, 'ddp' in B (incidental)",
    ]


def test_the_chain_can_be_worked_out_from_the_log_alone(runs):
    """The numbers in metrics.jsonl are the raw bits: what Python reads back gives the same sha256."""
    chain = ""
    for line in steps(runs, "two"):
        rate, norm = line["learning_rate"], line["gradient_norm"]
        chain = link(chain, line["step"], loss=line["loss"], norm=norm, rate=rate)
        assert chain == line["chain"]
    assert chain == summary(runs / "two")["chain"]
    newest = layout.read_manifest(runs / "two" / "checkpoints" / "step-000000014")
    assert newest.progress["chain"] == chain


@pytest.mark.parametrize(("stop_after", "log_every", "every_steps"), [(4, 3, 4), (8, 14, 3)])
def test_an_interrupted_run_goes_on_with_its_chain(ranks, runs, tmp_path, stop_after, log_every, every_steps):
    """Saved between logged steps, resumed on another world, with other steps logged and saved."""
    changed = {"observe": {"log_every": log_every}, "checkpoint": {"every_steps": every_steps}, **CONSTANT}
    (message, _) = ranks(2, run_on_rank, config_in(tmp_path, "parts", **changed), "auto", stop_after)
    assert message.startswith("Interrupted")
    stopped = summary(tmp_path / "parts")
    assert stopped["chain"] == steps(runs, "two")[stopped["steps"] - 1]["chain"]
    resumed = ranks(3, run_on_rank, config_in(tmp_path, "parts", observe={"log_every": 2}, **CONSTANT))[0]
    assert resumed["chain"] == summary(runs / "two")["chain"]
    whole = steps(runs, "two")
    assert [line for line in whole if line in steps(tmp_path, "parts")] == steps(tmp_path, "parts")
    code, out, _ = compare(tmp_path / "parts", runs / "two")
    assert code == 0
    assert out[2].startswith("equal: 14 steps")


def test_a_killed_run_goes_on_with_its_chain(ranks, runs, copied):
    """Killed after step 12, when step 10 had been saved: no line is lost or repeated, and none is another."""
    (copied / "summary.json").unlink()
    shutil.rmtree(copied / "checkpoints" / "step-000000014")
    kept = [line for line in (copied / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 12]
    (copied / "metrics.jsonl").write_text("\n".join(kept) + '\n{"kind": "st')
    assert compare(copied, runs / "two")[1][2].startswith("equal so far, not to the end of both: 12 steps · chain ")
    ranks(1, run_on_rank, config_in(copied.parent, "copied", **CONSTANT))
    assert lines(copied.parent, "copied") == lines(runs, "two")
    assert compare(copied, runs / "two")[0] == 0


def test_a_run_that_is_the_beginning_of_another_is_equal_so_far(ranks, runs, tmp_path):
    short = {**CONSTANT, "train": {"steps": 7, "epochs": None}, "observe": {"log_every": 3}}
    ranks(1, run_on_rank, config_in(tmp_path, "short", **short))
    code, out, _ = compare(tmp_path / "short", runs / "two")
    assert code == 0
    assert out[2].startswith("equal so far, not to the end of both: 7 steps · chain ")
    assert out[2].endswith("; A ends there, B goes on to step 14")
    assert out[3] == "all 32 tensors of step 5 are equal"
    assert "  train.steps: 7 in A, 14 in B (incidental)" in out  # for the learning rate is constant


def test_checkpoints_by_themselves(runs):
    a, b = (runs / name / "checkpoints" / "step-000000005" for name in ("alone", "two"))
    code, out, _ = compare(a, b)
    assert code == 0
    assert out[2].startswith("equal: 5 steps · chain ")
    assert compare(a, runs / "two")[0] == 0
    assert compare(a, runs / "seed")[0] == 1


def test_without_common_checkpoints_it_goes_by_what_was_logged(runs, copied):
    shutil.rmtree(copied / "checkpoints")
    code, out, _ = compare(copied, runs / "two")
    assert code == 0
    assert out[2].startswith("equal: 14 steps · chain ")
    assert out[3] == "there is no checkpoint of a step that both have kept whole: no tensors were compared"


def test_a_damaged_checkpoint_is_passed_over(runs, copied):
    part = next((copied / "checkpoints" / "step-000000014").glob("__0*"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    code, out, _ = compare(runs / "two", copied)
    assert code == 0
    assert out[3] == "all 32 tensors of step 10 are equal"
    assert out[4].startswith(f"note: passed over {copied}/checkpoints/step-000000014: ")


# ---- different


def test_another_seed_differs_from_the_first_step(runs):
    code, out, _ = compare(runs / "two", runs / "seed")
    assert code == 1
    assert out[2] == "different: at step 1, the first that can be compared"
    assert [line.split(":")[0] for line in out[3:6]] == ["  loss", "  gradient norm", "  chain"]
    assert out[6].startswith("tensors of step 5: 24 of 32 differ, in ")
    assert out[7].startswith("  the first is model.features.conv1.bias: 32 of 32 elements differ, by at most ")
    assert "  run.seed: 0 in A, 3 in B" in out


def test_another_learning_rate_is_named_first(runs):
    code, out, _ = compare(runs / "two", runs / "rate")
    assert code == 1
    assert out[2] == "different: at step 4, the first that can be compared"
    assert out[3] == "  learning rate: 0.001 in A, 0.002 in B"
    assert out[7] == "  they diverge in one of steps 1 to 4; observe.log_every=1 would tell in which"
    fields = out[out.index("recipes:") + 1 :]
    assert fields == ["  optim.lr: 0.001 in A, 0.002 in B", "  observe.log_every: 1 in A, 4 in B (incidental)"]


def flip_on_rank(folder, name, *, tells):
    """Write a checkpoint anew, sound in every respect, with the last bit of one number turned."""
    tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in reader.contents(folder).items()}
    reader.load(folder, tensors)
    tensors[name].view(-1).view(torch.int32)[1] ^= 1
    manifest = layout.read_manifest(folder)
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    assert tells or name.startswith("optimizer.")
    assert (digest(weights) != manifest.digest) == tells
    shutil.rmtree(folder)
    save(folder.parent, tensors, manifest)


@pytest.mark.parametrize("name", ["model.features.conv2.weight", "optimizer.features.conv2.weight.exp_avg"])
def test_one_bit_of_one_weight_is_found(lone, runs, copied, name):
    tells = name.startswith("model.")
    checkpoint = copied / "checkpoints" / "step-000000010" if tells else copied / "checkpoints" / "step-000000014"
    flip_on_rank(checkpoint, name, tells=tells)
    code, out, _ = compare(runs / "two", copied)
    assert code == 1
    if tells:
        assert out[2] == "different: at step 10, after step 9 was equal"
        assert out[3].startswith("  digest: ")
    else:
        assert out[2] == "different, although all that was logged up to step 14 is equal"
    assert out[-2] == f"tensors of step {10 if tells else 14}: 1 of 32 differ, in 1 elements"
    assert out[-1] == f"  the first is {name}: 1 of 18,432 elements differ, by 1 ulp"


def written(folder, log, **settings):
    """A run of which only the log is left."""
    folder.mkdir()
    recipe = config.parse(type(starter("digits")), json.dumps(settings), file="made here")
    (folder / "recipe.yaml").write_text(config.dump(recipe), encoding="utf-8")
    log = [{"kind": "step", "step": step, **values} for step, values in log.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


def test_a_difference_between_logged_steps_is_no_secret(tmp_path):
    a = written(tmp_path / "a", {10: {"loss": 0.5, "chain": "aa"}, 20: {"loss": 0.25, "chain": "ab"}})
    b = written(tmp_path / "b", {10: {"loss": 0.5, "chain": "aa"}, 20: {"loss": 0.25, "chain": "cd"}})
    code, out, _ = compare(a, b)
    assert code == 1
    assert out[2:5] == [
        "different: at step 20, after step 10 was equal",
        "  chain: ab in A, cd in B",
        "  they diverge in one of steps 11 to 20; observe.log_every=1 would tell in which",
    ]


def test_where_an_evaluation_alone_differs_the_steps_before_it_are_not_suspected(tmp_path):
    a, b = (
        written(tmp_path / name, {10: {"loss": 0.5, "chain": "aa"}, 20: {"loss": 0.25, "chain": "ab"}}) for name in "ab"
    )
    for folder, value in ((a, 0.5), (b, 0.75)):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "evaluation", "step": 20, "accuracy": value}) + "\n")
    code, out, _ = compare(a, b)
    assert code == 1
    assert "  evaluation accuracy: 0.5 in A, 0.75 in B" in out
    assert not any("they diverge in" in line for line in out)


def test_a_loss_that_is_not_finite_is_another_value(tmp_path):
    a = written(tmp_path / "a", {1: {"loss": 0.5}}, optim={"lr": 0.1})
    b = written(tmp_path / "b", {1: {"loss": None}, 2: {"loss": None}})
    code, out, _ = compare(a, b)
    assert code == 1
    assert "  loss: 0.5 in A, NaN or infinite in B" in out
    assert out[-1] == "  optim.lr: 0.1 in A, 0.001 in B"  # without a numeric recipe nobody can say whether it matters


# ---- mistakes


def refused(result, *fragments):
    code, out, err = result
    assert (code, out) == (2, []), result
    assert err.count("\n") == 1, err
    assert not [fragment for fragment in fragments if fragment not in err], err


def test_mistakes_are_told_in_one_line(runs, copied, tmp_path):
    refused(compare(runs / "two", tmp_path / "none"), f"{tmp_path}/none is no run, no checkpoint", "runs/NAME")
    refused(compare(tmp_path, runs / "two"), f"{tmp_path} is no run, no checkpoint")
    refused(compare(runs / "two" / "summary.json", runs / "two"), "is no run and no checkpoint")
    newest, older = (runs / "two" / "checkpoints" / f"step-0000000{step}" for step in (14, 10))
    refused(compare(newest, older), "have no step in common", "14 steps and 10 steps")
    young = written(tmp_path / "young", {})
    refused(compare(young, runs / "two"), "have no step in common", "(0 steps and 14 steps)")
    for name, text in [("recipe.yaml", "a: [\n"), ("summary.json", "[]"), ("summary.json", "{"), ("recipe.yaml", "1")]:
        before = (copied / name).read_text()
        (copied / name).write_text(text)
        refused(compare(runs / "two", copied), f"{copied}")
        (copied / name).write_text(before)
    manifest = copied / "checkpoints" / "step-000000014" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("14", "15"))
    refused(compare(manifest.parent, runs / "two"), "cannot be read: the manifest has been changed")


# ---- units of the last place

FORMATS = {
    torch.float16: (np.uint16, np.float16),
    torch.bfloat16: (np.uint16, None),
    torch.float32: (np.uint32, np.float32),
    torch.float64: (np.uint64, np.float64),
}


def number(kind, bits):
    """The floating-point number with these bits, as a tensor [1]."""
    unsigned, _ = FORMATS[kind]
    width = np.dtype(unsigned).itemsize * 8
    signed = bits - 2**width if bits >= 2 ** (width - 1) else bits
    return torch.tensor([signed], dtype=getattr(torch, f"int{width}")).view(kind)


def place(kind, bits):
    """Where a number stands in the line of all numbers, counted from zero."""
    sign = 1 << (np.dtype(FORMATS[kind][0]).itemsize * 8 - 1)
    return -(bits ^ sign) if bits & sign else bits


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@given(data=st.data())
def test_ulps_count_the_numbers_between(kind, data):
    width = np.dtype(FORMATS[kind][0]).itemsize * 8
    a, b = (data.draw(st.integers(0, 2**width - 1)) for _ in range(2))
    x, y = number(kind, a), number(kind, b)
    expected = 0 if x.isnan().any() or y.isnan().any() else abs(place(kind, a) - place(kind, b))
    assert int(ulps(x, y)[0]) == int(ulps(y, x)[0]) == expected
    assert (difference("x", x, y) is None) == (a == b)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64], ids=str)
@given(data=st.data())
def test_neighbours_are_one_ulp_apart(kind, data):
    unsigned, real = FORMATS[kind]
    x = np.array([data.draw(st.integers(0, 2 ** (np.dtype(unsigned).itemsize * 8) - 1))], unsigned).view(real)
    if np.isfinite(x).all():
        with np.errstate(over="ignore"):  # the largest number's neighbour is infinity
            above, below = np.nextafter(x, real(np.inf)), np.nextafter(x, real(-np.inf))
        for neighbour in (above, below):
            assert int(ulps(torch.from_numpy(x), torch.from_numpy(neighbour))[0]) == 1
        assert int(ulps(torch.from_numpy(above), torch.from_numpy(below))[0]) == 2


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_ulps_across_zero_and_at_the_ends(kind):
    sign = 1 << (np.dtype(FORMATS[kind][0]).itemsize * 8 - 1)
    smallest, minus_smallest, zero, minus_zero = (number(kind, bits) for bits in (1, sign | 1, 0, sign))
    assert int(ulps(minus_smallest, smallest)[0]) == 2
    assert int(ulps(minus_zero, zero)[0]) == 0
    found = difference("x", zero, minus_zero)
    assert (found.elements, found.largest) == (1, 0)
    assert (
        str(found)
        == "1 of 1 elements differ, by 0 ulps (other bits of the same value: +0 and -0, or NaNs of two kinds)"
    )
    infinity = torch.tensor([float("inf")], dtype=kind)
    largest = torch.tensor([torch.finfo(kind).max], dtype=kind)
    assert int(ulps(infinity, largest)[0]) == 1
    assert int(ulps(infinity, -infinity)[0]) == 2 * place(
        kind, int(infinity.view(getattr(torch, f"int{kind.itemsize * 8}")))
    )
    nan = torch.tensor([float("nan"), 1.0], dtype=kind)
    found = difference("x", nan, torch.ones(2, dtype=kind))
    assert (found.elements, found.nans, found.largest) == (1, 1, 0)
    assert str(found).endswith("; 1 of them are NaN on one side only")
    assert difference("x", nan, nan.clone()) is None


def test_other_tensors_have_a_plain_difference():
    def text(a, b):
        return str(difference("x", torch.as_tensor(a), torch.as_tensor(b)))

    assert text([1, 5], [1, 2]) == "1 of 2 elements differ, by 3"
    assert text(-(2**63), 2**63 - 1) == f"1 of 1 elements differ, by {2**64 - 1:,}"
    assert text([True, True], [False, False]) == "2 of 2 elements differ, by at most 1"
    assert text([1.0], [1]) == "float32 [1] in A, int64 [1] in B"
    assert text([[1.0]], [1.0]) == "float32 [1, 1] in A, float32 [1] in B"
    assert text([1 + 2j], [1 + 2.0000002j]) == "1 of 2 elements differ, by 1 ulp"
    assert difference("x", torch.empty(0), torch.empty(0)) is None


def test_weights_come_before_the_optimizer_and_missing_tensors_are_told(lone, tmp_path):
    common = {"optimizer.a.exp_avg": torch.zeros(2), "model.b": torch.zeros(3), "model.c": torch.ones(3)}
    manifest = layout.Manifest(step=1, epoch=1, world_size=1, saved_at=0.0, numeric={}, progress={})
    a = save(tmp_path / "a", {**common, "ema.b": torch.zeros(3)}, manifest).folder
    other = {name: tensor + (name != "model.c") for name, tensor in common.items()}
    b = save(tmp_path / "b", {**other, "model.a": torch.zeros(4)}, manifest).folder
    count, found = differences(a, b)
    assert count == 5
    assert [each.name for each in found] == ["model.a", "model.b", "ema.b", "optimizer.a.exp_avg"]
    assert [str(each) for each in (found[0], found[2])] == ["only in B", "only in A"]
