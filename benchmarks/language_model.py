"""A small language model: Lockstep beside a hand-written DDP loop in the manner of nanoGPT, in turns, in one run.

    python benchmarks/language_model.py [--rounds 3] [--steps 150] [--out FILE]

All contenders train on the texts of examples/gpt.yaml with two processes of one thread, the same global batch, context,
learning rates and number of steps. "nanoGPT-like" has nanoGPT's layers (LayerNorm, GELU, learned positions, one matrix
for queries, keys and values) and nearly as many weights; "our model" is Lockstep's model in the same loop. The loop
draws its samples at random, as nanoGPT does. Tokens/s after the first steps; the loss is that on the whole test split
at the end. Ratios are to the nanoGPT-like loop of the same round. Run nothing else beside it.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured_at import measured_at
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.base.contracts import DataSpec
from lockstep.models._gpt import GPT
from lockstep.models.gpt import Config
from lockstep.recipe import recipe as recipes
from lockstep.recipe.splits import open_splits

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.yaml"
WORLD, WARM_UP = 2, 10
RATE, WARM_UP_SHARE = 4e-3, 0.05
LIKE, SAME, OURS = "nanoGPT-like loop", "the same loop with our model", "Lockstep"


class Layer(nn.Module):
    """As in nanoGPT, [m, T, W] -> [m, T, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGPT(nn.Module):
    """Tokens int64 [m, T] -> logits [m, T, V], with a tied head."""

    def __init__(self, *, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                scale = (2 * layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


class OurModel(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model({"input_ids": tokens})


def hand_written(steps: int, *, is_ours: bool) -> None:
    """The loop of one process; rank 0 prints tokens/s and the test loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, recipe = dist.get_rank(), recipes.load(EXAMPLE)
    data, train, section = open_splits(recipe), recipe.train, recipe.model
    context, vocabulary = recipe.data.context, data.train.spec.vocabulary
    tokens, share = np.asarray(data.train.ids).astype(np.int64), train.global_batch // WORLD
    torch.manual_seed(0)
    sizes = {"width": section.width, "layers": section.layers, "heads": section.heads}
    if is_ours:
        spec = DataSpec(modality="tokens", vocabulary=vocabulary)
        network: nn.Module = OurModel(GPT(Config(kind="gpt", **sizes), spec, vocabulary))
    else:
        network = NanoGPT(vocabulary=vocabulary, context=context, **sizes)
    model = DistributedDataParallel(network)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
    generator, marks = np.random.default_rng(rank), [0.0] * (steps + 1)
    for step in range(steps):
        starts = generator.integers(0, len(tokens) - context - 1, share)
        rows = torch.from_numpy(np.stack([tokens[start : start + context + 1] for start in starts]))
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if recipe.optim.clip:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip)
        optimizer.step()
        if step % 10 == 0:
            loss.item()  # for the log
        marks[step + 1] = time.monotonic()
    if rank == 0:
        seconds = (marks[-1] - marks[WARM_UP]) / (steps - WARM_UP)
        speed = train.global_batch * context / seconds
        sys.stdout.write(json.dumps({"speed": speed, "loss": test_loss(network, data.test)}))
    dist.destroy_process_group()


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine to 0."""
    warm_up = WARM_UP_SHARE * steps
    if step < warm_up:
        return RATE * (step + 1) / warm_up
    return RATE * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def test_loss(network: nn.Module, test: object) -> float:
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, len(test), 32):
            batch = test.__getitems__(range(start, min(start + 32, len(test))))
            tokens, target = (torch.from_numpy(batch[name]) for name in ("input_ids", "target"))
            total += float(F.cross_entropy(network(tokens).flatten(0, 1), target.flatten(), reduction="sum"))
            count += target.numel()
    return total / count


def run(contender: str, steps: int) -> dict[str, float]:
    """One training -> tokens/s and the test loss."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if contender != OURS:
        command = ["torchrun", f"--nproc-per-node={WORLD}", "--master-port=0", "--standalone", __file__, "--loop"]
        command += ["ours" if contender == SAME else "like", "--steps", str(steps)]
        command[0] = str(Path(sys.executable).with_name("torchrun"))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        settings = ["train.epochs=null", f"train.steps={steps}", f"run.dir={folder}", "run.name=r"]
        settings += [f"launch.processes={WORLD}", "evaluate.every_epochs=null", "evaluate.sample_tokens=0"]
        command = [str(Path(sys.executable).with_name("lockstep")), "train", str(EXAMPLE), *settings]
        subprocess.run(command, env=environment, capture_output=True, timeout=900, check=True)
        summary = json.loads((Path(folder) / "r" / "summary.json").read_text(encoding="utf-8"))
    context = recipes.load(EXAMPLE).data.context
    return {"speed": summary["train_samples_per_second"] * context, "loss": summary["evaluation"]["loss"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--loop", choices=["like", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="append a table to this file")
    given = parser.parse_args()
    if given.loop:
        hand_written(given.steps, is_ours=given.loop == "ours")
        return
    contenders = (LIKE, SAME, OURS)
    rounds = [{name: run(name, given.steps) for name in contenders} for _ in range(given.rounds)]
    lines = ["| | tokens/s | ratio (lowest to highest) | test loss |", "|---|---|---|---|"]
    for name in contenders:
        ratios = sorted(each[name]["speed"] / each[LIKE]["speed"] for each in rounds)
        speed, loss = (statistics.median(each[name][key] for each in rounds) for key in ("speed", "loss"))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {speed:,.0f} | {spread} | {loss:.3f} |")
    text = f"Figures {measured_at()}, {given.rounds} rounds of {given.steps} steps\n\n" + "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if given.out:
        with given.out.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}")


if __name__ == "__main__":
    main()
