"""A torch.export program: graph and weights, without the model's code."""

import io
from pathlib import Path

import torch

from lockstep.base import storage, trust
from lockstep.base.model_contracts import Batch, Forward, Model, Outputs
from lockstep.inference.export.export_facts import ExportFacts, file_in
from lockstep.inference.export.formats._graph import Traceable, dynamic_dimensions, inputs_of, silence, tracing

DTYPES = ("fp32", "fp16", "bf16")
FILE = "model.pt2"
PROGRAM = FILE
"""File whose loading can run any code: torch unpickles, evaluates shapes, calls any torch function nodes name."""


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Write the program, with dynamic batch size and length. Raises ModelError for a model that cannot be traced."""
    inputs = inputs_of(batch, facts.learned.TARGETS)
    shapes = tuple(dict.fromkeys(dynamic_dimensions(name), torch.export.Dim.DYNAMIC) for name in inputs)
    traceable, samples = Traceable(model, list(inputs)).eval(), tuple(inputs.values())
    with tracing(facts.kind):
        program = torch.export.export(traceable, samples, dynamic_shapes=(shapes,), strict=False)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # source lines with paths of this machine
    buffer = io.BytesIO()  # on a full disk torch.export.save aborts the process
    with silence():
        torch.export.save(program, buffer)
    storage.write(folder / FILE, buffer.getvalue())
    trust.remember([trust.Code.of(folder / FILE, buffer.getvalue())])


def read(folder: Path, facts: ExportFacts) -> Forward:
    """Load the program. Raises UntrustedCode for one from another machine."""
    with storage.regular(file_in(folder, FILE)) as file:
        content = file.read()
    trust.admit(folder / FILE, content, folder)
    with silence():
        program = torch.export.load(io.BytesIO(content)).module()
    names = list(facts.inputs)

    def forward(batch: Batch) -> Outputs:
        return program(*(batch[name] for name in names))

    return forward
