"""Which precision has the faster matrix products is measured here, and said where it is worth a change."""

import pytest
import torch
from running import lockstep

from lockstep.core.host import matmul_speed
from lockstep.core.host.matmul_speed import FASTER, compare_precisions, faster_precision

CPU = torch.device("cpu")
GPT = ["data.kind=text", "data.tokenizer=bytes", "model.kind=gpt", "launch.processes=1", "evaluate.every_epochs=null"]
GPT += ["data.context=8", "train.steps=1", "train.epochs=null", "train.global_batch=2", "train.micro_batch=2"]


def test_the_two_directions_agree_and_no_random_number_is_drawn():
    before = torch.get_rng_state()
    assert [compare_precisions(each)[0] for each in ("fp32", "bf16")] == ["bf16", "fp32"]
    products = (compare_precisions("fp32")[1] * compare_precisions("bf16")[1] for _ in range(5))
    assert any(0.5 < product < 2 for product in products)  # other processes slow some of them down
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_said_from_a_ratio_on(precision, monkeypatch):
    other = FASTER[precision][0]
    monkeypatch.setitem(matmul_speed.FASTER, precision, (other, 0.0))
    assert f"train.precision={other} shortens steps" in faster_precision(precision, CPU, parameters=10**6)
    assert not faster_precision(precision, CPU, parameters=10**5)
    assert not faster_precision(precision, torch.device("cuda"), parameters=10**6)
    monkeypatch.setitem(matmul_speed.FASTER, precision, (other, float("inf")))
    assert not faster_precision(precision, CPU, parameters=10**6)


@pytest.mark.parametrize("width", [16, 256])
def test_a_run_says_it_of_a_large_model(tmp_path, width):
    """On a processor where one of the two is far ahead; elsewhere no run says anything."""
    (tmp_path / "run.yaml").write_text("{}")
    slower = max(("fp32", "bf16"), key=lambda each: compare_precisions(each)[1])
    settings = [f"model.width={width}", "model.layers=1", "model.heads=2", f"train.precision={slower}"]
    run = lockstep(tmp_path, "train", "run.yaml", *GPT, *settings)
    assert run.returncode == 0, run.stderr
    is_far_ahead = compare_precisions(slower)[1] > 1.3 * FASTER[slower][1]
    assert ("times as fast" in run.stdout + run.stderr) >= (is_far_ahead and width == 256)
    assert width == 256 or "times as fast" not in run.stdout + run.stderr
