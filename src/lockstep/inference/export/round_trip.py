"""Compares an export that was read back with the trained model, on real samples; one that holds a user's file also in
a new process, which cannot import what lies beside the original."""

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.base import plugins, trust
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward, Outputs
from lockstep.core.modules.outputs import each, logits_of, tensors
from lockstep.core.numerics.seeds import generators_restored, seed_all
from lockstep.core.numerics.word_tokens import IGNORED
from lockstep.inference.export import export_facts, export_reader
from lockstep.inference.export.export_facts import RoundTrip

TOLERANCE = 1e-3
"""Largest difference of an output: absolute, or relative to the largest output if that is more than 1. Measured: 1e-6
(onnxruntime), 3e-7 (the same weights at other addresses: a product with a single row depends on their alignment)."""
FRESH_START = (
    "import sys; sys.path.append(sys.argv[1]); from lockstep.inference.export import round_trip; "
    "round_trip.read_elsewhere()"
)
FRESH_HINT = (
    "An export takes along what the model's file imports from its own folder by import statements: other code has to "
    "be an installed package, and another file an absolute path in model.options"
)
FIXED_LENGTH = ("invalid dimensions", "Guard failed")
"""Messages of onnxruntime and torch.export about inputs of another shape than the traced one."""


def compare(model: Forward, again: Forward, batches: Iterable[Batch]) -> RoundTrip:
    """Run both on the same samples. Raises ModelError if the export fails or gives outputs that are not finite."""
    largest_difference = largest_output = 0.0
    counts: Counter[str] = Counter()
    for batch in batches:
        with generators_restored():
            seed_all(0)  # a model may draw random numbers
            expected = outputs(model, batch)
            seed_all(0)
            actual = _export_outputs(again, batch)
        before, after = tensors(expected), tensors(actual)
        if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
            shapes = " instead of ".join(", ".join(str([*t.shape]) for t in group) for group in (after, before))
            raise ModelError(f"the export was read back and gives outputs of shape {shapes}; nothing was kept")
        largest_difference = max([largest_difference, *map(_difference, before, after)])
        magnitudes = (float(tensor.abs().nan_to_num(posinf=0).max()) for tensor in before if tensor.numel())
        largest_output = max([largest_output, *magnitudes])
        counts["samples"] += len(next(iter(batch.values())))
        logits, again_logits = logits_of(expected), logits_of(actual)
        label = batch.get("label")
        if logits is not None and again_logits is not None and _has_classes(logits, label):
            counts.update(_label_counts(logits.argmax(-1), again_logits.argmax(-1), label))
    labelled = counts["labelled"]
    return RoundTrip(
        samples=counts["samples"],
        largest_difference=largest_difference,
        largest_output=largest_output,
        labels_changed=counts["changed"],
        accuracy_before=counts["correct before"] / labelled if labelled else None,
        accuracy_after=counts["correct after"] / labelled if labelled else None,
    )


def judge(agreement: RoundTrip) -> None:
    """Raise ModelError for a difference that rounding cannot explain."""
    largest = agreement.largest_difference
    if largest > TOLERANCE * max(1, agreement.largest_output):
        raise ModelError(
            f"the export was read back and differs (largest difference {largest:g}); nothing was kept. A model whose "
            "forward pass draws random numbers can be exported as weights (export.kind=pretrained), not as a graph"
        )


def same_weights(model: nn.Module, again: Forward, *, is_reduced: bool = False) -> bool:
    """Compare parameters and buffers bit for bit -> False if a graph was read back, which has none. Raises ModelError.
    Buffers that are not saved are computed anew: in fp32, or in the dtype that their class wants (RecurrentGemma)."""
    if not isinstance(again, nn.Module):
        return False
    if is_reduced:
        expected, actual = model.state_dict(), again.state_dict()
    else:
        expected, actual = (dict([*each.named_parameters(), *each.named_buffers()]) for each in (model, again))
    saved = model.state_dict().keys()
    for name, tensor in expected.items():
        found = actual.get(name)
        if found is not None and name not in saved:
            dtype = torch.promote_types(tensor.dtype, found.dtype)
            tensor, found = tensor.to(dtype), found.to(dtype)
        if found is None or tensor.dtype != found.dtype or not torch.equal(tensor, found):
            raise ModelError(f"the export was read back and differs (in {name}); nothing was kept")
    return True


def outputs(forward: Forward, batch: Batch) -> Outputs:
    """Return the outputs for a batch in evaluation mode, floats as fp32."""
    if isinstance(forward, nn.Module):
        forward.eval()
    with torch.inference_mode():
        return each(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, forward(batch))


def _export_outputs(forward: Forward, batch: Batch) -> Outputs:
    try:
        return outputs(forward, batch)
    except Exception as error:  # of torch, of onnxruntime, of a user's code in another dtype than it was written for
        reason = str(error).strip().partition("\n")[0]
        is_length = any(message in str(error) for message in FIXED_LENGTH)
        repair = ". A graph may hold samples of one length alone: export.kind=pretrained takes any model" * is_length
        raise ModelError(f"the export was read back and cannot predict ({reason}); nothing was kept{repair}") from error


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest absolute difference; equal infinities are equal."""
    differences = (expected - actual)[expected != actual].abs()
    if not differences.isfinite().all():
        raise ModelError("the export was read back and gives outputs that are not finite; nothing was kept")
    return float(differences.max()) if len(differences) else 0.0


def _has_classes(logits: Tensor, label: Tensor | None) -> bool:
    """Return whether logits are those of classes, [m, K] or, with a label for each token, [m, T, K]."""
    is_labelled = label is not None and label.shape == logits.shape[:-1]
    return logits.ndim > 1 and logits.shape[-1] > 1 and (logits.ndim == 2 or is_labelled)


def _label_counts(before: Tensor, after: Tensor, label: Tensor | None) -> dict[str, int]:
    if label is None or label.shape != before.shape:
        return {"changed": int((before != after).sum())}
    counted = label != IGNORED
    counts = {"changed": (before != after) & counted, "labelled": counted}
    counts |= {"correct before": before == label, "correct after": after == label}
    return {name: int(each.sum()) for name, each in counts.items()}


def check_elsewhere(folder: Path, again: Forward, batch: Batch) -> None:
    """Raise ModelError unless the export, read in a new process and another folder, answers as `again` does."""
    with tempfile.TemporaryDirectory() as elsewhere:
        file = Path(elsewhere, "batch.pt")
        torch.save(batch, file)
        hidden = [str(each) for each in trust.FOLDERS if each != folder]
        command = [sys.executable, "-P", "-c", FRESH_START, str(plugins.ROOT.parent), str(folder), str(file), *hidden]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
            raise ModelError(
                f"the export was read in a new process, in another folder, and cannot be used there ({reason}); "
                f"nothing was kept. {FRESH_HINT}"
            )
        answers: list[Tensor] = torch.load(file, weights_only=True)
    judge(compare(lambda _: tensors(outputs(again, batch)), lambda _: answers, [batch]))


def read_elsewhere() -> None:
    """Run the new process: its arguments are a folder with lockstep in it, the export, a batch, and folders not to
    be imported from. Replaces the batch by the tensors of the outputs."""
    folder, file, *hidden = map(Path, sys.argv[2:])
    sys.path[:] = [entry for entry in sys.path if not any(Path(entry).absolute() == each for each in hidden)]
    try:
        facts = export_facts.read(folder)
        trust.own(export_reader.code_of(folder, facts))
        forward = export_reader.forward_of(folder, facts)
        export_reader.metrics_of(folder, facts)
        seed_all(0)
        torch.save(tensors(outputs(forward, torch.load(file, weights_only=True))), file)
    except Exception as error:  # of the user's code
        sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
