"""Lockstep beside other trainers on one GPU: an encoder of DistilBERT's size, a GPT of 100 million weights, a CNN.

    python benchmarks/gpu.py [--seconds 240] [--out FILE]
    python benchmarks/gpu.py --tiny --device cpu              # tries the program itself

Needs no network and no data: MNIST's files and texts are made. Every contender is a process of its own with its own
limit, first those that say most; what has no time left, fails or is not installed is named. Per contender: samples/s
(tokens/s for the GPT) after the warm-up and a ratio to the tuned loop; MFU against the matrix products that this GPU
reaches; the peak of its memory for tensors; then from a profile of five more steps how much of the time the GPU is
busy, and how many kernels a step launches. All in bf16, one process, micro-batch = batch. Run nothing else beside it.
"""

import argparse
import gzip
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
from compare import GRACE, PEERS, SCRIPTS, Setting, lockstep, prepare
from gpt import GPT, SIZES
from measured_at import measured_at
from works import CNN, MAX_LENGTH, WORKS, Work, text_model

from lockstep.base.lifetime import end_family
from lockstep.core.host.matmul_speed import peak_flops

KINDS = ("encoder", "gpt", "cnn")
CONTENDERS: dict[str, tuple[str, list[str]]] = {
    "tuned loop": ("tuned loop", []),
    "Lockstep exact": ("Lockstep exact", []),
    "Lockstep fast": ("Lockstep fast", []),
    "Accelerate": ("Accelerate", []),
    "HF Trainer": ("HF Trainer", []),
    "Lightning": ("Lightning", []),
    "Lockstep exact, compiled blocks": ("Lockstep exact", ["train.compile=true"]),
    "tuned loop, compiled": ("tuned loop", ["--compile"]),
}
"""Those of compare.py, with further arguments; first those that say most."""
PACKAGES = {"Accelerate": "accelerate", "HF Trainer": "accelerate", "Lightning": "lightning"}
PROFILED = 5
LEAST_SECONDS = 5.0
"""Without which nothing is started."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def make_data(folder: Path) -> Path:
    """MNIST's four files, texts of more than MAX_LENGTH tokens in AG News' form, and a tokenizer -> its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    images, labels = np.arange(28 * 28, dtype=np.uint8).reshape(1, 28, 28), np.arange(10, dtype=np.uint8)
    for name in ("mnist", "ag_news"):
        (folder / name).mkdir(parents=True)
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        for kind, magic, rows in (("images-idx3", 2051, images), ("labels-idx1", 2049, labels)):
            head = np.array([magic, count, *rows.shape[1:]], ">i4").tobytes()
            body = np.resize(rows, (count, *rows.shape[1:])).tobytes()
            (folder / "mnist" / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body, 1))
    words = re.sub(r"[^A-Za-z]+", " ", " ".join(topics.values())).split()
    twice, starts = words + words, range(0, 37 * WORKS["gpu-encoder"].samples, 37)
    texts = [" ".join(twice[(at := start % len(words)) : at + 2 * MAX_LENGTH]) for start in starts]
    for split in ("train", "test"):
        lines = "".join(f'"{number % 4 + 1}","","{text}"\n' for number, text in enumerate(texts))
        (folder / "ag_news" / f"{split}.csv").write_text(lines, encoding="utf-8")
    (folder / "ag_news" / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n", encoding="utf-8")
    made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder / "words"
    )
    return folder / "words"


def flops(work: Work) -> int:
    """Operations of forward and backward pass of a sample, without those of an update."""
    counter = FlopCounterMode(display=False)
    with torch.device("meta"), counter:
        if work.is_text:
            tokens = torch.zeros(1, MAX_LENGTH, dtype=torch.int64)
            text_model(work.model, Path())(input_ids=tokens).logits.sum().backward()
        elif work.model == "cnn":
            CNN()(torch.zeros(1, 1, 28, 28)).sum().backward()
        else:
            size = SIZES[work.model]
            GPT(size)(torch.zeros(1, size.length, dtype=torch.int64)).sum().backward()
    return counter.get_total_flops()


def command(name: str, setting: Setting, device: str) -> list[str]:
    """What starts a contender."""
    base, more = CONTENDERS[name]
    work, folder = setting.work, setting.folder
    if base not in SCRIPTS:
        alone = [
            "launch.processes=1",
            f"train.micro_batch={work.global_batch}",
            f"run.device={device}",
            "evaluate.limit=512",
        ]
        profiled = f"observe.profile_steps=[{work.steps - PROFILED + 1},{work.steps}]"
        return [*lockstep(base, setting), *alone, "run.name=r", f"run.dir={folder / 'meter'}", profiled, *more]
    folders = ["--data", str(folder), "--model", str(setting.model), "--out", str(folder / "meter")]
    return [sys.executable, str(PEERS / SCRIPTS[base]), "--work", work.name, *folders, "--device", device, *more]


def run(name: str, setting: Setting, *, device: str, limit: float) -> dict[str, float] | str:
    """The figures of a contender, or why there are none."""
    package, folder = PACKAGES.get(name), setting.folder
    if package and importlib.util.find_spec(package) is None:
        return f"not installed ({package})"
    meter = Path(tempfile.mkdtemp(dir=folder))
    (folder / "meter").unlink(missing_ok=True)
    (folder / "meter").symlink_to(meter)
    variables = {"METER": str(meter), "BEGAN": str(time.time()), "PROFILED": str(PROFILED), "OMP_NUM_THREADS": "1"}
    variables |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    variables |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with (meter / "output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command(name, setting, device), cwd=meter, env=os.environ | variables, stdout=output, stderr=output
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        end_family(process, grace_seconds=GRACE if code is None else 0)
        output.seek(0)
        said = [line.strip() for line in output.read().splitlines() if line.strip()]
    if code is None:
        return f"stopped after {limit:.0f} s"
    if code or not (meter / "rank-0.json").exists():
        sys.stderr.write("\n".join(said[-30:]) + "\n")
        return f"failed: {said[-1][:150] if said else f'exit code {code}'}"
    seen = json.loads((meter / "rank-0.json").read_text(encoding="utf-8"))
    return seen | of_profile(next(iter(meter.rglob("trace*.json.gz"))))


def of_profile(file: Path) -> dict[str, float]:
    """Share of the time in which the GPU of a trace works, and kernels that a step launches; none without a GPU."""
    with gzip.open(file, "rt", encoding="utf-8") as trace:
        events = [each for each in json.load(trace)["traceEvents"] if each.get("ph") == "X"]
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") in ON_GPU)
    if not spans:
        return {}
    busy, end = 0.0, -math.inf
    for begin, stop in spans:
        busy, end = busy + max(0.0, stop - max(begin, end)), max(end, stop)
    launches = sum(
        "LaunchKernel" in each["name"] for each in events if each.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    return {"busy": busy / (end - spans[0][0]), "launches": launches / PROFILED}


def table(work: Work, seen: dict[str, dict[str, float] | str], peak: float) -> list[str]:
    """The lines of a work."""
    tokens = SIZES[work.model].length if work.model in SIZES else 1
    per_sample, reference = flops(work), seen.get("tuned loop")
    unit = "tokens/s" if tokens > 1 else "samples/s"
    lines = [
        f"### {work.name}: {work.model}, G = {work.global_batch}, {per_sample / 1e9:.3g} GFLOP a sample",
        "",
        f"| contender | {unit} | ratio to the tuned loop | MFU | peak memory, MiB | GPU busy | launches a step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in seen.items():
        if isinstance(found, str):
            lines.append(f"| {name} | {found} | | | | | |")
            continue
        rate = work.global_batch / found["seconds_per_step"]
        ratio = (
            f"{reference['seconds_per_step'] / found['seconds_per_step']:.2f}" if isinstance(reference, dict) else ""
        )
        memory = (found["gpu_peak_bytes"] or found["peak_bytes"]) / 2**20
        profile = [f"{found['busy']:.0%}", f"{found['launches']:.0f}"] if "busy" in found else ["no GPU", "no GPU"]
        columns = [f"{rate * tokens:,.0f}", ratio, f"{rate * per_sample / peak:.1%}", f"{memory:.0f}", *profile]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return [*lines, ""]


def heading(device: torch.device, peak: float, seconds: float) -> list[str]:
    """Machine and versions."""
    names = ("transformers", "accelerate", "lightning", "triton")
    versions = [f"Python {sys.version.split()[0]}"]
    versions += [
        f"{name} {importlib.import_module(name).__version__}" for name in names if importlib.util.find_spec(name)
    ]
    cuda = f", CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}" if device.type == "cuda" else ""
    text = f"Figures {measured_at(device)}{cuda}; {', '.join(versions)}."
    return [
        f"{text} bf16, one run each; products of matrices reach {peak / 1e12:.3g} TFLOP/s. {seconds:.0f} s in all.",
        "",
    ]


def measured(device: str, *, sizes: str, seconds: float, out: Path | None, chosen: Sequence[str]) -> int:
    """Run all contenders and write the tables; 1 where one has failed."""
    began, peak = time.monotonic(), peak_flops("bf16", torch.device(device))
    works = {kind: WORKS[f"{sizes}-{kind}"] for kind in KINDS}
    seen: dict[str, dict[str, dict[str, float] | str]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as temporary:
        settings, model = {}, make_data(Path(temporary, "made"))
        for kind, work in works.items():
            (folder := Path(temporary, kind)).mkdir()
            settings[kind] = Setting(work, folder, model, PEERS)
            prepare(settings[kind], Path(temporary, "made"))
        for name in chosen:
            for kind in KINDS if name != "HF Trainer" else ("encoder",):
                left = seconds - (time.monotonic() - began)
                found: dict[str, float] | str = "cut: no time was left"
                if left > LEAST_SECONDS:
                    found = run(name, settings[kind], device=device, limit=min(left, seconds / 3))
                seen[kind][name] = found
                sys.stderr.write(f"{time.monotonic() - began:.0f} s: {name}, {kind}: {found}\n")
                lines = heading(torch.device(device), peak, time.monotonic() - began)
                lines += [line for each in KINDS if seen[each] for line in table(works[each], seen[each], peak)]
                if out:
                    out.write_text("\n".join(lines), encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(str(found).startswith("failed") for each in seen.values() for found in each.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps: a trial of the program")
    parser.add_argument("--seconds", type=float, default=240, help="in all")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/gpu-DATE.md; none with --tiny")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("no GPU was found, so nothing was measured; --tiny --device cpu tries the program\n")
        return 2
    default = None if given.tiny else Path(__file__).parent / "results" / f"gpu-{datetime.now():%Y-%m-%d}.md"
    sizes = "tiny" if given.tiny else "gpu"
    out = given.out or default
    return measured(given.device, sizes=sizes, seconds=given.seconds, out=out, chosen=given.contenders)


if __name__ == "__main__":
    sys.exit(main())
