"""An ONNX graph, for onnxruntime and others."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.core.host.memory_meter import available_bytes
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats._graph import Traceable, dynamic_dimensions, inputs_of, silence, tracing

DTYPES = ("fp32", "fp16", "int8")
PROGRAM = None
FILE = "model.onnx"
MOST_SECONDS, POLL_SECONDS = 120.0, 0.05
"""Time limit of a forward pass, as a graph may hold endless loops, and interval of its checks."""
LEAST_BYTES = 512 << 20
"""Memory that has to remain free during a forward pass."""


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Write the graph, with dynamic batch size and length; weights beyond 2 GB go to model.onnx.data beside it. Raises
    ModelError for a model that cannot be traced, MissingExtra without onnx."""
    plugins.require("onnx", "onnx", "onnxscript", "onnxruntime", what="export.kind=onnx")
    inputs = inputs_of(batch, facts.learned.TARGETS)
    if ambiguous := sorted({*inputs} & {*facts.outputs}):
        raise ModelError(
            f"the outputs {ambiguous} have the names of columns of the data, which an ONNX graph cannot tell apart: "
            "rename them in forward(), or use export.kind=pretrained"
        )
    traceable, shapes = Traceable(model, list(inputs)).eval(), tuple(dynamic_dimensions(name) for name in inputs)
    with tracing(facts.kind):
        program: Any = torch.onnx.export(
            traceable,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=[*facts.outputs] or ["logits"],
            dynamic_shapes=(shapes,),
            dynamo=True,
            verbose=False,
        )
    for graph in (program.model.graph, *program.model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)  # source lines with paths of this machine
    program.save(folder / FILE)
    if facts.dtype == "int8":
        _quantise(folder / FILE)


def _quantise(file: Path) -> None:
    """Quantise matrix products to int8, dynamically."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(file)
    del graph.graph.value_info[:]  # shapes of the traced sample, which quantisation would reject
    file.with_name(f"{FILE}.data").unlink(missing_ok=True)
    with silence():
        quantize_dynamic(graph, file, weight_type=QuantType.QInt8)


def read(folder: Path, facts: ExportFacts) -> Forward:
    """Open an onnxruntime session on the CPU. Raises MissingExtra without onnxruntime."""
    plugins.require("onnx", "onnxruntime", what="an ONNX export")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    storage.regular(folder / FILE).close()  # not a FIFO
    session = onnxruntime.InferenceSession(folder / FILE, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def forward(batch: Batch) -> Tensor | dict[str, Tensor]:
        with _limits(facts.kind) as run:
            arrays = session.run(None, {name: batch[name].numpy() for name in names}, run)
        outputs = [torch.from_numpy(array) for array in arrays]
        return dict(zip(facts.outputs, outputs, strict=True)) if facts.outputs else outputs[0]

    return forward


@contextmanager
def _limits(what: str) -> Iterator[Any]:
    """Yield options of a run that ends when it takes too long or too much memory. Raises ModelError then."""
    import onnxruntime

    options, done, end = onnxruntime.RunOptions(), threading.Event(), time.monotonic() + MOST_SECONDS

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if time.monotonic() > end or available_bytes() < LEAST_BYTES:
                options.terminate = True
                return

    threading.Thread(target=watch, name="onnx-limits", daemon=True).start()
    try:
        yield options
    except Exception as error:
        if options.terminate:
            reason = f"takes more than {MOST_SECONDS:g} s, or all memory: it may have no end"
            raise ModelError(f"a forward pass of this {what} graph {reason}") from error
        raise
    finally:
        done.set()
