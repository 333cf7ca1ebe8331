"""Training imports neither torch's compiler nor scipy.optimize; whoever asks for them gets the real packages."""

import json
import subprocess
import sys

import pytest
from members import further

CONFIG = "data: {kind: digits, limit: 64}\ntrain: {steps: 2, global_batch: 16}\n"
RUN = """
import json, sys
sys.argv = ["worker", "c.yaml", *sys.argv[1:]]
from lockstep.run import worker
code = worker.main(sys.argv[1:])
print(json.dumps([code, type(sys.modules["torch._dynamo"]).__name__]))
"""
COMPILED = """
import sys
import torch
from torch import nn
from lockstep.core.host import deferred_imports

deferred_imports.install()
layer = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
assert type(torch._dynamo).__name__ == "DeferredDynamo"
assert "sympy" not in sys.modules

SUBMODULE
traced = []

def backend(graph, inputs):
    traced.extend(node.op for node in graph.graph.nodes)
    return graph.forward

@torch.compiler.disable
def excluded(x):
    return x.sin()

def function(x):
    optimizer.zero_grad()
    return excluded(x * 2) + 1

assert torch.compile(function, backend=backend)(torch.zeros(3)).tolist() == [1, 1, 1]
assert traced
assert sys.modules["torch._dynamo"] is torch._dynamo
assert type(torch._dynamo).__name__ == "module"
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
assert type(torch.optim.Optimizer.zero_grad.__wrapped__).__name__ == "function"
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable is not torch.optim.Optimizer.zero_grad.__wrapped__
"""


@pytest.mark.parametrize("kind", ["ddp", *further("single")])
def test_training_does_not_import_it(tmp_path, kind):
    (tmp_path / "c.yaml").write_text(CONFIG)
    words = [sys.executable, "-c", RUN, f"parallel.kind={kind}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, "DeferredDynamo"], done.stderr


MARKED = """
import sys
import torch
from lockstep.core.host import deferred_imports

deferred_imports.install()
import transformers.modeling_utils
from transformers.integrations.eager_paged import eager_paged_attention_forward as excluded
from transformers.masking_utils import TransformGetItemToIndex

assert type(torch._dynamo).__name__ == "DeferredDynamo"
assert "torch._dynamo.eval_frame" not in sys.modules
marks = len(torch._dynamo.marks)
from torch._dynamo import config
assert excluded._torchdynamo_disable
assert torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex is TransformGetItemToIndex
assert marks > 1
"""


def test_transformers_does_not_import_it_and_what_it_marks_stays_marked():
    done = subprocess.run([sys.executable, "-c", MARKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


OPTIMIZED = """
import sys
from lockstep.core.host import deferred_imports

deferred_imports.install()
import torch
from transformers.loss.loss_for_object_detection import linear_sum_assignment
from transformers.loss.loss_utils import LOSS_MAPPING

assert "scipy.optimize._optimize" not in sys.modules
USE
assert sys.modules["scipy.optimize"].__file__.endswith("__init__.py")
import scipy.optimize
assert scipy.optimize.minimize(lambda x: (x - 3) ** 2, 0).x.round(3) == 3
assert linear_sum_assignment(torch.tensor([[4, 1], [2, 3]]))[1].tolist() == [1, 0]
"""


@pytest.mark.parametrize(
    "use",
    [
        "assert linear_sum_assignment([[4, 1], [2, 3]], maximize=True)[1].tolist() == [0, 1]",
        *further(
            "from scipy.optimize import minimize",
            "from scipy import optimize; optimize.minimize",
            "import scipy, scipy.optimize._linprog as submodule; assert submodule is scipy.optimize._linprog",
            "from sklearn.datasets import load_digits; import scipy.optimize; scipy.optimize.minimize",
        ),
    ],
)
def test_losses_for_detection_do_not_import_scipy_before_they_are_used(use):
    done = subprocess.run(
        [sys.executable, "-c", OPTIMIZED.replace("USE", use)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "submodule",
    [
        "from torch._dynamo import utils; utils.counters.clear()",
        *(
            pytest.param(line, marks=pytest.mark.matrix)
            for line in ("", "import torch._dynamo.config", "from torch._dynamo.eval_frame import innermost_fn")
        ),
    ],
)
def test_who_compiles_gets_the_real_one(submodule):
    """However it is imported: once, and with what torch had excluded before."""
    code = COMPILED.replace("SUBMODULE", submodule)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
