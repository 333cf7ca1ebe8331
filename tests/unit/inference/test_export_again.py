"""An export that takes the place of another: what stays, what goes, and what is compared."""

import exporting
import numpy as np
import pytest
import torch
import torch._dynamo  # transformers imports it, which sets a variable: better here than inside a test
from exporting import listing, names

from lockstep.base.errors import ModelError
from lockstep.inference import trained_model
from lockstep.inference.export import export_facts
from lockstep.inference.export.export_facts import Calibration
from lockstep.inference.export.round_trip import same_weights


@pytest.fixture
def case():
    return exporting.image_case()


@pytest.fixture
def second():
    """Another of the same shape."""
    return exporting.image_case(seed=2)


def test_what_others_have_put_into_an_export_stays(case, tmp_path):
    """Such as its git repository; but not what is no longer true of it."""
    case.export(tmp_path / "e", "state_dict", file="one.pt")
    (tmp_path / "e" / ".git" / "refs").mkdir(parents=True)
    for name in (".git/HEAD", "notes.txt", "evaluation.html"):
        (tmp_path / "e" / name).write_text("mine")
    (tmp_path / "e" / "link").symlink_to("nowhere")
    (tmp_path / "e" / ".git" / "HEAD").chmod(0o555)  # as a hook is
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "e" / "elsewhere").symlink_to(tmp_path / "secret")
    case.export(tmp_path / "e", "state_dict", file="two.pt")
    there = [".git", "README.md", "elsewhere", "link", "lockstep.json", "notes.txt", "two.pt"]
    assert names(tmp_path / "e") == there
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "e" / ".git" / "HEAD").read_text() == "mine"
    assert (tmp_path / "e" / ".git" / "HEAD").stat().st_mode & 0o777 == 0o555
    assert (tmp_path / "e" / ".git" / "refs").is_dir()
    assert (tmp_path / "e" / "link").is_symlink()
    case.export(tmp_path / "e", "state_dict", file="two.pt")
    assert names(tmp_path / "e") == there


def test_a_temperature_stays_with_the_same_weights(case, second, tmp_path):
    found = Calibration(temperature=1.5, samples=9, ece_before=0.2, ece_after=0.1)
    case.export(tmp_path / "e")
    export_facts.write(export_facts.read(tmp_path / "e").model_copy(update={"calibration": found}), tmp_path / "e")
    case.export(tmp_path / "e")
    assert export_facts.read(tmp_path / "e").calibration == found
    for other in (case.export(tmp_path / "e", dtype="bf16"), second.export(tmp_path / "e", dtype="bf16")):
        assert other.calibration is None


def test_a_figure_that_is_no_number_is_no_hindrance(case, tmp_path):
    case.export(tmp_path / "e")
    told = export_facts.read(tmp_path / "e").model_copy(update={"metrics": {"auroc": float("nan")}})
    export_facts.write(told, tmp_path / "e")
    assert np.isnan(trained_model.open_predictor(tmp_path / "e").facts.metrics["auroc"])


def test_buffers_that_no_file_holds_may_be_computed_anew():
    """As rotary embeddings are, in fp32, whatever the weights have become."""

    class Rotary(torch.nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.layer = torch.nn.Linear(2, 2, dtype=dtype)
            self.register_buffer("inverse", torch.tensor([1 / 3]), persistent=False)

    one, two = Rotary(torch.bfloat16), Rotary(torch.bfloat16)
    two.load_state_dict(one.state_dict())
    one = one.to(torch.bfloat16)
    assert same_weights(one, two, is_reduced=True)
    with pytest.raises(ModelError, match="differs \\(in inverse\\)"):
        same_weights(one, two)
    with torch.no_grad():
        two.layer.bias[0] += 1
    with pytest.raises(ModelError, match="differs \\(in layer.bias\\)"):
        same_weights(one, two, is_reduced=True)


def test_an_export_that_nobody_can_read_is_not_replaced(case, tmp_path):
    case.export(tmp_path / "e")
    (tmp_path / "e" / "lockstep.json").write_text("{")
    old = listing(tmp_path)
    with pytest.raises(ModelError, match=r"is damaged(.|\n)*name another folder with --to"):
        case.export(tmp_path / "e")
    assert listing(tmp_path) == old
