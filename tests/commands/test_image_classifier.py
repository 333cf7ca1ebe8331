"""Image models of transformers: images of any size through their own processor, on any number of processes, exported."""

import json
import shutil

import numpy as np
import pytest
import torch
from members import further
from PIL import Image
from running import lockstep, summary
from served import as_text, png, serving

from lockstep.base.errors import DataError, LockstepError
from lockstep.core.host.pretrained_processors import ImageProcessor
from lockstep.recipe import recipe, splits
from lockstep.recipe.build import build_model

SETTINGS = ["train.steps=8", "train.global_batch=12", "train.micro_batch=3", "optim.lr=0.01", "observe.log_every=1"]
VARIANTS = {
    "one": ["launch.processes=1"],
    "two": ["launch.processes=2"],
    "three": ["launch.processes=3"],
    "fsdp": ["launch.processes=2", "parallel.kind=fsdp"],
    "pipeline": ["launch.processes=2", "parallel.kind=pipeline"],
    "cut": ["launch.processes=2", "parallel.kind=pipeline", "parallel.cut=[3]"],
}
MODELS = {"vit": ["two", "three", "fsdp", "pipeline"], "resnet": ["three", "fsdp"], "convnext": ["two", "cut"]}
"""Model -> the variants that are compared with one process. ResNet has batch norms; in ConvNeXt, what is cut before
block 3 is channels last, and its gradient is not."""
COLORS = {"red": (170, 110, 110), "green": (110, 170, 110), "blue": (110, 110, 170)}


def models_in(folder):
    """Tiny models with random weights and their processors: one that scales, one that crops the middle."""
    from transformers import (
        ConvNextConfig,
        ConvNextForImageClassification,
        ConvNextImageProcessorPil,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
        ViTImageProcessorPil,
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vit = ViTConfig(**sizes, image_size=32, patch_size=8)
    resnet = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    convnext = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    scaling = ViTImageProcessorPil(size={"height": 32, "width": 32})
    cropping = ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=0.8, image_mean=[0.4, 0.5, 0.6])
    for name, model, processor in (
        ("vit", ViTForImageClassification(vit), scaling),
        ("resnet", ResNetForImageClassification(resnet), cropping),
        ("convnext", ConvNextForImageClassification(convnext), cropping),
    ):
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)


def image(color, generator):
    """A noisy image of a random size."""
    height, width = generator.integers(20, 60, 2)
    return Image.fromarray(generator.normal(color, 60, (height, width, 3)).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of three classes, models, and config files."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    models_in(folder)
    for name, color in COLORS.items():
        (folder / "data" / name).mkdir(parents=True)
        for number in range(24):
            image(color, generator).save(folder / "data" / name / f"{number}.png")
    for name in MODELS:
        config = {"data": {"kind": "files", "train": "data"}, "model": {"kind": "image_classifier", "name": name}}
        (folder / f"{name}.yaml").write_text(json.dumps(config))
    return folder


def train(folder, model, variant):
    name = f"{model}-{variant}"
    done = lockstep(folder, "train", f"{model}.yaml", *SETTINGS, *VARIANTS[variant], f"run.name={name}")
    assert done.returncode == 0, done.stdout + done.stderr
    return summary(folder, name)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["resnet", *further("convnext", "vit")])
def test_the_same_bits_and_metrics_on_any_cluster(folder, model):
    expected = train(folder, model, "one")
    for variant in MODELS[model]:
        found = train(folder, model, variant)
        for name in ("digest", "evaluation"):
            assert found[name] == expected[name], (variant, name)


@pytest.fixture(scope="module")
def run(folder):
    """Of a model whose processor crops."""
    name = "runs/convnext-one"
    if not (folder / name / "summary.json").exists():
        train(folder, "convnext", "one")
    done = lockstep(folder, "export", name)
    assert done.returncode == 0 and "the same weights bit for bit" in done.stdout, done.stdout + done.stderr
    return folder / name


def test_transformers_and_the_server_say_the_same_of_an_image_of_any_size(run):
    """With the export's own processor; `transformers` chooses the same without torchvision."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    generator = np.random.default_rng(7)
    images = [image(color, generator) for color in COLORS.values()]
    theirs = AutoModelForImageClassification.from_pretrained(run / "export").eval()
    processor = AutoImageProcessor.from_pretrained(run / "export", backend="pil")
    with torch.no_grad():
        inputs = [processor(each, return_tensors="pt")["pixel_values"] for each in images]
        expected = theirs(pixel_values=torch.cat(inputs)).logits.softmax(-1)
    with serving(run / "export") as server:
        for row, each in zip(expected, images, strict=True):
            found = server.post(json={"image": as_text(png(each))}).json()["probabilities"]
            assert [found[theirs.config.id2label[number]] for number in range(3)] == pytest.approx(
                row.tolist(), abs=1e-5
            )
    assert (expected.amax(0) - expected.amin(0)).max() > 0.01  # it tells the images apart
    assert 'pipeline("image-classification", "FOLDER_OF_THIS_FILE")' in (run / "export" / "README.md").read_text()


def test_evaluated_and_predicted(folder, run):
    found = []
    for where in (run, run / "export"):
        done = lockstep(folder, "evaluate", str(where), "--file", "data", "--to", "evaluation")
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads((folder / "evaluation" / "evaluation.json").read_text())["metrics"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    done = lockstep(folder, "predict", str(run), "data/red", "--out", "predicted.csv")
    assert done.returncode == 0 and "24 rows written" in done.stdout, done.stdout + done.stderr


def test_digits_become_what_the_model_takes(tmp_path):
    """Grey images of 8 x 8, for a model of coloured ones, 32 x 32, and for one of grey ones."""
    models_in(tmp_path)
    name = str(tmp_path / "vit")
    asked = recipe.of_sections({"data": {"kind": "digits"}, "model": {"kind": "image_classifier", "name": name}})
    assert asked.data.image_processor == name
    data = splits.open_splits(asked)
    pixels = data.train.__getitems__([0])["image"]
    assert (pixels.shape, data.train.spec.image_shape) == ((1, 3, 32, 32), (3, 32, 32))
    assert (pixels == pixels[:, :1]).all() and pixels.max() > 200
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config | {"num_channels": 1}))
    assert ImageProcessor(name).shape == (1, 32, 32)
    factors, shifts = ImageProcessor(name).normalization
    assert (factors, shifts) == (pytest.approx((1 / 127.5,)), pytest.approx((1.0,)))


def keep_proportions(folder):
    from transformers import ConvNextImageProcessorPil

    ConvNextImageProcessorPil(size={"shortest_edge": 384}, crop_pct=1.0).save_pretrained(folder / "vit")
    file = folder / "vit" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "vit" / "preprocessor_config.json").write_text("{"), "cannot load the image proc"),
        (keep_proportions, "keeps the shape of an image"),
    ],
)
def test_processors_that_do_not_fit_are_told(tmp_path, damage, message):
    models_in(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        ImageProcessor(str(tmp_path / "vit"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.image_processor=none"], "set data.image_size="),
        (["data.image_processor=none", "data.image_size=[16,16]"], "does not take images of 3 x 16 x 16"),
        (["data.image_processor=other"], "data.image_processor: it is other, which is not saved with the model"),
        (["model.name=words"], "with which transformers does not classify images"),
    ],
)
def test_what_does_not_fit_is_said_in_one_message(folder, monkeypatch, settings, message):
    from transformers import DistilBertConfig

    monkeypatch.chdir(folder)
    shutil.copytree(folder / "vit", folder / "words", dirs_exist_ok=True)
    DistilBertConfig().save_pretrained(folder / "words")
    with pytest.raises(LockstepError) as raised:
        asked = recipe.load(folder / "vit.yaml", settings)
        build_model(asked, splits.open_splits(asked).train.spec)
    assert message in str(raised.value)
