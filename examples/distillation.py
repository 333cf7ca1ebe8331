"""A small student learns from a teacher: from the labels, and from all that the teacher's probabilities say.

model.kind=user model.file=examples/distillation.py model.options='{teacher: EXPORT, temperature: 2, weight: 0.5}'

Source: G. Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
"""

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from lockstep import LossSum
from lockstep.inference.export.export_reader import forward_of


class Student(nn.Module):
    """Two layers. The teacher lies in a list, so that it is no part of what is trained, saved and exported."""

    def __init__(self, classes, options):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, classes))
        self.options = options
        self.teacher = [forward_of(pathlib.Path(options["teacher"]))]

    def forward(self, batch):
        logits = self.layers(batch["image"].float() / 255)
        if not self.training:
            return {"logits": logits}
        with torch.no_grad():
            return {"logits": logits, "teacher": self.teacher[0](batch)}

    def loss(self, outputs, batch):
        """Sums over samples; T squared keeps the gradient's size at any temperature."""
        total = F.cross_entropy(outputs["logits"], batch["label"], reduction="sum")
        if "teacher" in outputs:
            heat, weight = self.options.get("temperature", 2.0), self.options.get("weight", 0.5)
            soft, wanted = (F.log_softmax(outputs[name] / heat, dim=-1) for name in ("logits", "teacher"))
            distance = F.kl_div(soft, wanted, reduction="sum", log_target=True) * heat**2
            total = (1 - weight) * total + weight * distance
        return LossSum(total, len(batch["label"]))


def build(options, spec):
    student = Student(len(spec.labels), options)
    student.layers(torch.zeros(2, *spec.image_shape))  # gives the lazy layer its size
    return student
