"""An ONNX graph, for onnxruntime and whatever else reads it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.base import plugins, storage
from lockstep.base.errors import ModelError
from lockstep.base.model_contracts import Batch, Forward, Model
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats._graph import Traceable, cannot_be_traced, inputs_of, moving_dimensions, silence

DTYPES = ("fp32", "fp16", "int8")
PROGRAM = None
FILE = "model.onnx"


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Batch and length may be of any size; beyond 2 GB the weights lie in model.onnx.data beside the graph.

    Raises ModelError for a model that cannot be traced, MissingExtra without the packages for it.
    """
    plugins.require("onnx", "onnx", "onnxscript", "onnxruntime", what="export.kind=onnx")
    inputs = inputs_of(batch)
    if twice := sorted({*inputs} & {*facts.outputs}):
        raise ModelError(
            f"the outputs {twice} have the names of columns of the data, which an ONNX graph cannot tell apart: call "
            "them something else in forward(), or use export.kind=pretrained"
        )
    traceable, shapes = Traceable(model, list(inputs)).eval(), tuple(moving_dimensions(name) for name in inputs)
    try:
        with silence():
            program: Any = torch.onnx.export(
                traceable,
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=[*facts.outputs] or ["logits"],
                dynamic_shapes=(shapes,),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # whatever the tracer raises about somebody's code
        raise cannot_be_traced(error, facts.kind) from error
    for graph in (program.model.graph, *program.model.functions.values()):
        for node in graph.all_nodes():
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)  # the author's code, with his files' paths
    program.save(folder / FILE)
    if facts.dtype == "int8":
        _quantise(folder / FILE)


def _quantise(file: Path) -> None:
    """Weights of matrix products as int8, activations quantised as they come."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(file)
    del graph.graph.value_info[:]  # shapes of the traced sample, which quantisation would take for contradictions
    file.with_name(f"{FILE}.data").unlink(missing_ok=True)
    with silence():
        quantize_dynamic(graph, file, weight_type=QuantType.QInt8)


def read(folder: Path, facts: ExportFacts) -> Forward:
    """A session of onnxruntime on the processor; raises MissingExtra without it."""
    plugins.require("onnx", "onnxruntime", what="an ONNX export")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    storage.regular(folder / FILE).close()  # a FIFO would never end
    session = onnxruntime.InferenceSession(folder / FILE, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def forward(batch: Batch) -> Tensor | dict[str, Tensor]:
        found = [torch.from_numpy(one) for one in session.run(None, {name: batch[name].numpy() for name in names})]
        return dict(zip(facts.outputs, found, strict=True)) if facts.outputs else found[0]

    return forward
