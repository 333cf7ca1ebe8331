"""The first difference between two traces: what is found, in which order, and what a real model's trace holds."""

import pytest
import torch
from torch import nn

from lockstep.base.model_contracts import MicroBatch
from lockstep.core.modules.module_trace import Trace, fingerprint
from lockstep.tools.prove.single_process_checks import agree
from lockstep.tools.prove.trace_diff import REPEATED, SPREAD, RunTrace, explained, first_difference


def call(name, inputs="a", hash="b"):
    return {"kind": "call", "step": 0, "shard": 1, "name": name, "inputs": inputs, "hash": hash}


def gradient(hash):
    return {"kind": "gradient", "step": 0, "shard": 1, "name": "w", "hash": hash}


def batch(hash, samples=(1, 2)):
    return {"kind": "batch", "step": 0, "shard": 1, "samples": list(samples), "columns": {"x": "0", "y": hash}}


def tensors(kind, hash, step=0):
    return {"kind": kind, "step": step, "tensors": {"u": "0", "v": hash}}


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([call("m"), gradient("a")], [call("m"), gradient("a")], None),
        ([tensors("weights", "a"), batch("a")], [tensors("weights", "b"), batch("b")], ("weights", "v", None)),
        ([batch("a"), call("m")], [batch("b"), call("m", "c", "d")], ("batch", "y", 1)),
        ([batch("a")], [batch("a", samples=(1, 3))], ("batch", "the samples", 1)),
        ([call("m"), call("n")], [call("m"), call("n", "a", "c")], ("call", "n", 1)),
        ([call("inner"), call("m")], [call("inner", "x", "c"), call("m", "a", "c")], ("call", "m", 1)),
        ([call("m")], [call("n")], ("flow", "m", 1)),
        ([call("m")], [call("m"), call("n")], ("flow", "n", 1)),
        ([call("m"), gradient("a")], [call("m"), gradient("b")], ("gradient", "w", 1)),
        ([gradient("a"), tensors("sum", "a")], [gradient("a"), tensors("sum", "b")], ("sum", "v", None)),
        ([tensors("weights", "a", step=1), gradient("a")], [tensors("weights", "b", step=1), gradient("b")], "first"),
    ],
)
def test_the_first_difference_is_found(one, other, found):
    """A module whose inputs differ is passed over; an earlier step, and an earlier rung of one, comes first."""
    difference = first_difference(RunTrace().add(one), RunTrace().add(other))
    if found is None:
        assert difference is None
    elif found == "first":
        assert (difference.step, difference.kind) == (0, "gradient")
    else:
        assert (difference.kind, difference.name, difference.shard) == found
        texts = [explained(difference, RunTrace(), meanings) for meanings in (REPEATED, SPREAD) if found[0] in meanings]
        assert texts and not [text for text in texts if found[1] not in text]


def test_a_trace_holds_calls_and_gradients_of_its_micro_batches_and_no_others():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    lines = []
    trace = Trace(model, lines.append)
    model(torch.zeros(1, 2))  # nobody expects it
    ghost = MicroBatch(step=4, shard=0, indices=(7,), batch={"x": torch.ones(1, 2)}, ghost=True)
    real = MicroBatch(step=4, shard=5, indices=(7, 8), batch={"x": torch.ones(2, 2)})
    trace.expect([ghost, real])
    for micro_batch in (ghost, real):
        model(micro_batch.batch["x"]).sum().backward()
    model.eval()
    model(real.batch["x"])
    trace.remove()
    model.train()
    model(real.batch["x"])
    assert lines.pop(0)["modules"]["1"] == "1 (torch.nn.ReLU)"
    assert {(line["step"], line["shard"]) for line in lines} == {(4, 5)}
    assert [line["name"] for line in lines if line["kind"] == "call"] == ["0", "1", ""]
    assert {line["name"] for line in lines if line["kind"] == "gradient"} == {"0.weight", "0.bias"}
    assert lines[0]["samples"] == [7, 8]


def test_a_fingerprint_sees_bits_types_and_shapes():
    values = [0.0, -0.0, None, "a", [1, [2]], [1, 2], {"a": 1}, torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1)]
    values += [torch.zeros(2, dtype=torch.float64), torch.zeros(0), torch.tensor(1.0), torch.tensor(1.0).bfloat16()]
    assert len({fingerprint(value) for value in values}) == len(values)
    assert fingerprint(torch.eye(2)) == fingerprint(torch.eye(2).t().contiguous().t())


@pytest.mark.parametrize(
    ("whole", "part", "same"),
    [
        (torch.arange(12.0).view(6, 2), torch.arange(12.0).view(6, 2)[4:], True),
        (torch.arange(12.0).view(6, 2), torch.arange(12.0).view(6, 2)[:2], False),
        (torch.arange(24.0).view(2, 6, 2), torch.arange(24.0).view(2, 6, 2)[:, 4:], True),
        (torch.arange(24.0).view(6, 4), torch.arange(24.0).view(6, 4)[4:, :3], True),
        (torch.arange(12.0), torch.arange(12.0)[8:], True),
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.tensor([-torch.inf] * 6), torch.tensor([-torch.inf] * 2), True),
        (torch.tensor([torch.nan] * 6), torch.tensor([1.0] * 2), False),
        (torch.arange(6), torch.arange(2), False),
    ],
    ids=["rows", "other rows", "second axis", "cut", "tokens", "scalar", "masks", "nan", "whole numbers"],
)
def test_rows_of_a_part_are_found_in_the_whole(whole, part, same):
    assert agree([whole], [part], sizes=(6, 2), tolerance=1e-6) == same
