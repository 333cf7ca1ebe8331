"""On a GPU: what is refused there is refused in one clear line, and a trained model is served from it."""

import pytest
from gpu_runs import HERE, LIMIT_SECONDS, ON_GPU, processes, recipe, run, trained
from served import PICTURE, png, serving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(6 * LIMIT_SECONDS)]

OPERATIONS = {
    "adaptive": ("nn.AdaptiveAvgPool2d(3)", 3, "of pool (AdaptiveAvgPool2d)"),
    "reflection": ("nn.ReflectionPad2d(1)", 8, "of pool (ReflectionPad2d)"),
    "bicubic": ("Bicubic()", 12, "upsample_bicubic2d_backward"),
}
"""Without a deterministic form on CUDA: the layer behind 6 x 6 pixels, how many it makes in a row, what a message has to
say."""
MODEL = """
import torch.nn.functional as F
from torch import nn


class Bicubic(nn.Module):
    def forward(self, images):
        return F.interpolate(images, scale_factor=2, mode="bicubic")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(1, 4, 3), OPERATION, nn.Linear(4 * SIDE * SIDE, 10)

    def forward(self, batch):
        return self.head(self.pool(self.conv(batch["image"].float())).flatten(1))


def build(options, spec):
    return Model()
"""


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_without_a_deterministic_form_is_named_with_its_module(name, tmp_path):
    layer, side, said = OPERATIONS[name]
    (tmp_path / "model.py").write_text(MODEL.replace("OPERATION", layer).replace("SIDE", str(side)))
    words = [*recipe("digits", tmp_path), *processes(1), "model.kind=user", "model.file=model.py", "train.steps=2"]
    code, output = run("train", *words, HERE, "--trust-code", "run.name=exact", folder=tmp_path)
    if ON_GPU:
        assert code != 0 and said in output and "run.reproducibility=fast" in output, output
        assert "Traceback" not in output
        trained(tmp_path, *words, "--trust-code", "run.reproducibility=fast", "run.name=fast")
    else:
        assert code == 0, output


def test_live_recovery_is_refused_where_processes_wait_in_nccl(tmp_path):
    words = [*recipe("digits", tmp_path), "launch.processes=1", "launch.max_restarts=3", "launch.recovery=live"]
    code, output = run("train", *words, HERE, "run.name=live", folder=tmp_path)
    if ON_GPU:
        assert code != 0 and "launch.recovery=live is for processors so far" in output, output
        assert "Traceback" not in output
    else:
        assert code == 0, output


def test_a_model_is_served_from_the_gpu(tmp_path):
    trained(tmp_path, *recipe("digits", tmp_path), *processes(1), "run.name=served")
    target, answers = tmp_path / "runs" / "served", {}
    for device in ("cuda" if ON_GPU else "auto", "cpu"):
        with serving(target, "--device", device, is_fresh=True) as server:
            assert server.get("/info").json()["device"].startswith("cpu" if device == "auto" else device)
            answer = server.post(content=png(PICTURE), headers={"content-type": "image/png"})
            assert answer.status_code == 200, answer.text
            answers[device] = answer.json()
    one, other = answers.values()
    assert one["label"] == other["label"]
    assert one["confidence"] == pytest.approx(other["confidence"], abs=1e-3)
