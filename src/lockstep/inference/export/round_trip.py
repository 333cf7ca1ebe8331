"""Whether what was read back is what was written, on real samples."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward, Outputs
from lockstep.core.modules.outputs import each, logits_of, tensors
from lockstep.core.numerics.seeds import generators_restored, seed_all
from lockstep.inference.export.export_facts import RoundTrip

TOLERANCE = 1e-3
"""An output may differ by this much, and by as much of the largest output where that is more than 1. Seen: 1e-6
(onnxruntime), 3e-7 (the very weights at other addresses: a product with a single row depends on their alignment)."""
FIXED_LENGTH = ("invalid dimensions", "Guard failed")
"""What onnxruntime and torch.export say of inputs of another shape than those that were traced."""


def compare(model: Forward, again: Forward, batches: Iterable[Batch]) -> RoundTrip:
    """Both on the same samples. Raises ModelError where what was read back cannot predict, or not finitely."""
    largest = highest = 0.0
    counts: Counter[str] = Counter()
    for batch in batches:
        with generators_restored():
            seed_all(0)  # a model may draw numbers, in both the same
            expected = outputs(model, batch)
            seed_all(0)
            found = _outputs_again(again, batch)
        before, after = tensors(expected), tensors(found)
        if [one.shape for one in before] != [one.shape for one in after]:
            shapes = " instead of ".join(", ".join(str([*one.shape]) for one in every) for every in (after, before))
            raise ModelError(f"the export was read back and gives outputs of shape {shapes}; nothing was kept")
        largest = max([largest, *map(_difference, before, after)])
        highest = max([highest, *(float(one.abs().nan_to_num(posinf=0).max()) for one in before if one.numel())])
        counts["samples"] += len(next(iter(batch.values())))
        logits, again_logits = logits_of(expected), logits_of(found)
        if logits is not None and again_logits is not None and logits.ndim == 2 and logits.shape[1] > 1:
            counts.update(_labels(logits.argmax(1), again_logits.argmax(1), batch.get("label")))
    labelled = counts["labelled"]
    return RoundTrip(
        samples=counts["samples"],
        largest_difference=largest,
        largest_output=highest,
        labels_changed=counts["changed"],
        accuracy_before=counts["right before"] / labelled if labelled else None,
        accuracy_after=counts["right after"] / labelled if labelled else None,
    )


def judge(agreement: RoundTrip) -> None:
    """Raise ModelError for a difference that rounding cannot make."""
    largest = agreement.largest_difference
    if largest > TOLERANCE * max(1, agreement.largest_output):
        raise ModelError(
            f"the export was read back and differs (largest difference {largest:g}); nothing was kept. A model whose "
            "forward pass draws random numbers can be exported as weights (export.kind=pretrained), not as a graph"
        )


def same_weights(model: nn.Module, again: Forward, *, is_reduced: bool = False) -> bool:
    """Whether weights were read back, and not a graph. Raises ModelError where they, or buffers, are other by a bit;
    of a model whose weights were reduced, buffers that no file holds may be computed anew, in fp32."""
    if not isinstance(again, nn.Module):
        return False
    if is_reduced:
        expected, found = model.state_dict(), again.state_dict()
    else:
        expected, found = (dict([*one.named_parameters(), *one.named_buffers()]) for one in (model, again))
    for name, tensor in expected.items():
        if name not in found or tensor.dtype != found[name].dtype or not torch.equal(tensor, found[name]):
            raise ModelError(f"the export was read back and differs (in {name}); nothing was kept")
    return True


def outputs(forward: Forward, batch: Batch) -> Outputs:
    """What a model gives for a batch, in evaluation mode; numbers as fp32, whatever they are computed in."""
    if isinstance(forward, nn.Module):
        forward.eval()
    with torch.inference_mode():
        return each(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, forward(batch))


def _outputs_again(forward: Forward, batch: Batch) -> Outputs:
    try:
        return outputs(forward, batch)
    except Exception as error:  # of torch, of onnxruntime, of somebody's code in another dtype than it was written for
        reason = str(error).strip().partition("\n")[0]
        is_length = any(word in str(error) for word in FIXED_LENGTH)
        mend = ". A graph may hold samples of one length alone: export.kind=pretrained takes any model" * is_length
        raise ModelError(f"the export was read back and cannot predict ({reason}); nothing was kept{mend}") from error


def _difference(expected: Tensor, found: Tensor) -> float:
    """The largest; equal infinities are equal."""
    differs = expected != found
    gaps = (expected - found)[differs].abs()
    if not gaps.isfinite().all():
        raise ModelError("the export was read back and gives outputs that are not finite; nothing was kept")
    return float(gaps.max()) if len(gaps) else 0.0


def _labels(before: Tensor, after: Tensor, label: Tensor | None) -> dict[str, int]:
    found = {"changed": int((before != after).sum())}
    if label is None or label.shape != before.shape:
        return found
    right = {"right before": int((before == label).sum()), "right after": int((after == label).sum())}
    return {**found, **right, "labelled": len(label)}
