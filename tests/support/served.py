"""Exports that are made in a second, and servers that serve them, as processes of their own."""

import base64
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from io import BytesIO

import httpx
import numpy as np
import torch
import warm
from PIL import Image

from lockstep.base import trust
from lockstep.base.contracts import DataSpec
from lockstep.core.numerics.digest import digest
from lockstep.inference.export.export_facts import facts_of
from lockstep.inference.export.export_writer import export
from lockstep.models import _cnn as cnn
from lockstep.models import _transformer as transformer
from lockstep.models import _user as user
from lockstep.recipe.export_config import ExportSection

LABELS = ("Business", "Sci/Tech", "Sports", "World")
DIGITS = DataSpec(modality="image", labels=tuple("0123456789"), image_shape=(1, 8, 8))

SLOW = """
import time

from torch import nn


class Slow(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, batch):
        assert batch["image"].amax() != 77, "this image is poison"
        if batch["image"].amin() == 200:
            time.sleep(1)
        return self.layer(batch["image"].flatten(1).float())


def build(options, spec):
    return Slow(len(spec.labels))
"""
"""Takes a second for an image without a dark pixel, and fails on one whose brightest pixel is 77."""


def _write(model, config, spec, folder, first, beside=lambda _: None):
    facts = facts_of(
        config,
        spec,
        name=folder.name,
        kind="",
        step=1,
        digest=digest(model.state_dict()),
        metrics={},
        recipe={"data": {"kind": "digits"}},
    )
    batches = {"first": [first], "every": lambda: [first]}
    export(model, folder, section=ExportSection(), facts=facts, **batches, write_more=beside)
    return folder


def text_export(folder, minilm, seed=0):
    """A MiniLM whose head is as it was born: its answers mean nothing, but they are its own."""
    torch.manual_seed(seed)
    config = transformer.Config(kind="transformer", name=str(minilm))
    spec, tokenizer = DataSpec(modality="text", labels=LABELS), transformer.tokenizer(config)
    model = transformer.build(config, spec)
    with torch.no_grad():
        model.network.classifier.weight *= 20  # else all texts would get the same label
    ids = torch.arange(2000, 2032).view(2, 16)
    return _write(
        model, config, spec, folder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tokenizer.save
    )


def image_export(folder, seed=0):
    """A CNN for pictures of 8 x 8."""
    torch.manual_seed(seed)
    config = cnn.Config(kind="cnn")
    return _write(
        cnn.build(config, DIGITS), config, DIGITS, folder, {"image": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}
    )


def slow_export(folder):
    """A user's model, which dawdles."""
    file = folder.parent / "slow.py"
    file.write_text(SLOW)
    trust.own(trust.code_with_imports(file))
    torch.manual_seed(0)
    config = user.Config(kind="user", file=file)
    images = {"image": torch.zeros(2, 1, 8, 8, dtype=torch.uint8)}
    return _write(
        user.build(config, DIGITS), config, DIGITS, folder, images, lambda to: (to / "slow.py").write_text(SLOW)
    )


def png(pixels, form="PNG"):
    """An image file's bytes."""
    file = BytesIO()
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file, form)
    return file.getvalue()


def as_text(file):
    """Base64, as JSON carries it."""
    return base64.b64encode(file).decode()


PICTURE = np.arange(64).reshape(8, 8) * 4
SLOWLY, POISON = png(np.full((8, 8), 200)), png(np.full((8, 8), 77))
"""For the slow model."""


class Served:
    """A running server."""

    def __init__(self, process, url):
        self.process, self.url = process, url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path="/predict", **more):
        return self.client.post(path, **more)

    def get(self, path, **more):
        return self.client.get(path, **more)

    def metric(self, name, **more):
        """The sum of the series whose names begin so."""
        lines = [line for line in self.get("/metrics", **more).text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def queued(self, count, times=5, seconds=20):
        """Wait until so many inputs wait, or more; `times` in a row, as an input waits a moment before it is taken."""
        end, seen = time.monotonic() + seconds, 0
        while seen < times:
            seen = seen + 1 if self.metric("lockstep_queue_inputs") >= count else 0
            assert time.monotonic() < end, f"{count} inputs never waited"
            time.sleep(0.01)

    def end(self, number=signal.SIGTERM, seconds=30):
        """Its exit code, and what it has said meanwhile."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


@contextmanager
def serving(target, *options, variables=None, is_fresh=False):
    """`lockstep serve TARGET ...` on a port of its own; nobody's leak, as it may stand for many tests.

    `is_fresh`: in a new interpreter, not one forked from a warm one."""
    words = ["lockstep", "serve", str(target), "--port", "0", *options]
    process = (subprocess.Popen if is_fresh else warm.Popen)(
        [sys.executable, "-m", *words] if is_fresh else words,
        env=os.environ | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    warm.server.standing.add(process.pid)
    try:
        first = process.stdout.readline()
        found = re.search(r"http://\S+", first)
        assert found, first + process.communicate(timeout=20)[0]
        server = Served(process, found[0])
        with server.client:
            yield server
        if process.poll() is None:
            process.terminate()
            assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        warm.server.standing.remove(process.pid)
        process.stdout.close()


def asking(server, file=SLOWLY, **more):
    """Ask for an image's label on a connection of its own; no certificates are read, which takes longer than asking."""
    options = {"headers": {"content-type": "image/png"}, "timeout": 30, "verify": False}
    return httpx.post(server.url + "/predict", content=file, **options, **more)
