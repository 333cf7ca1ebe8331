"""data.transforms: random changes of images that belong to the sample and the epoch."""

import re

import numpy as np
import pytest
import torch
from optimizer_runs import train_on_rank

from lockstep.base.contracts import DataSpec
from lockstep.base.errors import ConfigError, UserError
from lockstep.base.world import World
from lockstep.data.augment import ImageTransforms
from lockstep.recipe import build
from lockstep.recipe import recipe as recipes
from lockstep.recipe.splits import open_splits

TRANSFORMS = ["RandomHorizontalFlip", {"RandomCrop": {"size": [8, 8], "padding": 2}}, {"RandAugment": {"n": 2, "m": 9}}]
CONFIG = {
    "data": {"kind": "digits", "limit": 32, "transforms": TRANSFORMS},
    "model": {"kind": "cnn"},
    "train": {"epochs": 2, "global_batch": 16, "micro_batch": 4},
}


def changed(**data):
    return CONFIG | {"data": CONFIG["data"] | data}


def test_equal_bits(ranks):
    """On one and two processes, with and without loader workers; without the transforms other weights."""
    ((first, last),) = ranks(1, train_on_rank, CONFIG)
    assert ranks(2, train_on_rank, changed(workers=1)) == [(first, last)] * 2
    assert ranks(1, train_on_rank, changed(transforms=[])) != [(first, last)]


def test_a_sample_is_changed_anew_in_each_epoch():
    train, plain = (open_splits(recipes.of_sections(each)).train for each in (CONFIG, changed(transforms=[])))
    before = plain.__getitems__([3, 4])["image"]
    one, again, later = (train.drawn([3, 4], epoch)["image"] for epoch in (0, 0, 1))
    assert one.dtype == np.uint8 and one.shape == before.shape
    assert np.array_equal(one, again) and not np.array_equal(one, later) and not np.array_equal(one, before)
    assert np.array_equal(train.drawn([4], 0)["image"][0], one[1])


def test_pixels_that_are_not_changed_stay():
    never = changed(transforms=[{"RandomHorizontalFlip": {"p": 0.0}}])
    train, plain = (open_splits(recipes.of_sections(each)).train for each in (never, changed(transforms=[])))
    assert np.array_equal(train.drawn(range(20), 0)["image"], plain.__getitems__(list(range(20)))["image"])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"transforms": ["RandomHorizontalFlp"]}, "has no 'RandomHorizontalFlp' . did you mean 'RandomHorizontalFlip'"),
        ({"transforms": [{"RandomCrop": {"sise": [8, 8]}}]}, "RandomCrop cannot be used with .*sise"),
        (
            {"transforms": [{"RandomCrop": {"size": [6, 6]}}]},
            "6x6 pixels from those of 8x8.*the size of a crop be .8, 8.",
        ),
        ({"transforms": [["RandomCrop", 3]]}, "each is a name, or a name with options"),
    ],
)
def test_mistakes_are_answered_with_the_repair(lone, data, says):
    with pytest.raises(UserError, match=re.compile(says, re.DOTALL)):
        build.assemble(recipes.of_sections(changed(**data)), World(), torch.device("cpu"))


def test_only_images_are_changed():
    with pytest.raises(ConfigError, match="changes images, but these samples have none of one size"):
        ImageTransforms([{"RandomHorizontalFlip": {}}], DataSpec(modality="text"))


def test_colours_of_three_channels_change():
    """And those of one channel stay grey."""
    image = np.random.default_rng(0).integers(0, 256, (3, 6, 6)).astype(np.uint8)
    spec = DataSpec(modality="image", image_shape=(3, 6, 6))
    transform = ImageTransforms([{"ColorJitter": {"hue": 0.3, "p": 1.0}}], spec)
    assert not np.array_equal(transform({"image": image})["image"], image)
