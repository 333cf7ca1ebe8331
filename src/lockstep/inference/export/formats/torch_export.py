"""A torch.export program: the graph with its weights, which torch runs without the model's code."""

import io
from pathlib import Path

import torch

from lockstep.base import storage, trust
from lockstep.base.model_contracts import Batch, Forward, Model, Outputs
from lockstep.inference.export.export_facts import ExportFacts
from lockstep.inference.export.formats._graph import Traceable, cannot_be_traced, inputs_of, moving_dimensions, silence

DTYPES = ("fp32", "fp16", "bf16")
FILE = "model.pt2"
PROGRAM = FILE
"""Reading it is executing it: torch unpickles what it likes to, evaluates its shapes as expressions, and calls whatever
function of torch a node names."""


def write(model: Model, folder: Path, *, batch: Batch, facts: ExportFacts) -> None:
    """Batch and length may be of any size. Raises ModelError for a model that cannot be traced."""
    inputs = inputs_of(batch)
    shapes = tuple(dict.fromkeys(moving_dimensions(name), torch.export.Dim.DYNAMIC) for name in inputs)
    traceable, samples = Traceable(model, list(inputs)).eval(), tuple(inputs.values())
    try:
        with silence():
            program = torch.export.export(traceable, samples, dynamic_shapes=(shapes,), strict=False)
    except Exception as error:  # whatever the tracer raises about somebody's code
        raise cannot_be_traced(error, facts.kind) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # lines of the author's code, with the paths of his files
    buffer = io.BytesIO()  # on a full disk torch ends the whole process
    with silence():
        torch.export.save(program, buffer)
    storage.write(folder / FILE, buffer.getvalue())
    trust.remember([trust.Code.of(folder / FILE, buffer.getvalue())])


def read(folder: Path, facts: ExportFacts) -> Forward:
    """The program. Raises UntrustedCode for one that somebody else has written."""
    trust.require_known(folder)
    with storage.regular(folder / FILE) as file:
        content = file.read()
    trust.admit(folder / FILE, content)
    with silence():
        program = torch.export.load(io.BytesIO(content)).module()
    names = list(facts.inputs)

    def forward(batch: Batch) -> Outputs:
        return program(*(batch[name] for name in names))

    return forward
