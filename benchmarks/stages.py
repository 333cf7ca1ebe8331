"""The stages from one process to several machines on the MNIST CNN: throughput and memory of each, as one table.

    python benchmarks/stages.py --data FOLDER [--rounds 5] [--steps 150] [--out FILE]

FOLDER holds mnist/. The stages: a plain PyTorch loop, the same with DataParallel (where there are two GPUs), Lockstep
on one process, on two with ddp and with fsdp, and on two "nodes" of one process each, which are both on this machine
and meet at a rendezvous as two machines do. All train G = 128; Lockstep with micro-batches of 64. One round runs each
once, in turns; a ratio is to the plain loop of the same round. Memory is the peak of rank 0 up to the last step, in the
host's memory. Run nothing else beside it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
from compare import Setting, lockstep, middle, peak_of
from measured_at import add_precision, measured_at
from meter import Meter
from networks import free_port
from works import CNN, Work, normalized, read_images

PLAIN, PARALLEL = "plain PyTorch loop", "the same with DataParallel"
STAGES: dict[str, list[list[str]]] = {
    PLAIN: [],
    PARALLEL: [],
    "Lockstep, one process": [["parallel.kind=single", "launch.processes=1"]],
    "Lockstep, ddp on 2 processes": [["parallel.kind=ddp", "launch.processes=2"]],
    "Lockstep, fsdp on 2 processes": [["parallel.kind=fsdp", "launch.processes=2"]],
    "Lockstep, ddp on 2 nodes of one process": [
        ["parallel.kind=ddp", "launch.processes=1", "launch.nodes=2", f"--node-rank={rank}"] for rank in range(2)
    ],
}
"""Stage -> what its command on each node ends with; the first two are this script itself."""
LEARNING_RATE = 1e-3


def plain(folder: Path, work: Work, *, is_parallel: bool, is_bf16: bool) -> None:
    """The loop that most projects begin with, on one device or, with DataParallel, on all GPUs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = read_images(folder, "train")
    model: nn.Module = CNN().to(device)
    if is_parallel:
        model = nn.DataParallel(model)
    optimizer, meter = (
        torch.optim.AdamW(model.parameters(), lr=work.learning_rate),
        Meter(folder / "meter", rank=0, steps=work.steps),
    )
    for some in torch.randperm(work.samples).split(work.global_batch):
        inputs = normalized(torch.from_numpy(images[some.numpy()])).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss = F.cross_entropy(model(inputs), torch.from_numpy(labels[some.numpy()]).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        meter.step()
    meter.finish()


def commands(name: str, setting: Setting) -> list[list[str]]:
    """What starts a stage, on each of its nodes."""
    folder, work = setting.folder, setting.work
    if name in (PLAIN, PARALLEL):
        given = ["--data", str(folder), "--steps", str(work.steps), "--batch", str(work.global_batch)]
        given += ["--precision", setting.precision]
        return [[sys.executable, __file__, "--stage", name, *given]]
    ends, meeting = STAGES[name], ["--rendezvous", f"127.0.0.1:{free_port()}"]
    return [[*lockstep("Lockstep exact", setting), *end, *(meeting if len(ends) > 1 else [])] for end in ends]


def measured(name: str, setting: Setting) -> dict[str, float]:
    """Samples per second and peak bytes of one run. Raises RuntimeError with its output if it fails."""
    file = setting.folder / "meter" / "rank-0.json"
    file.unlink(missing_ok=True)
    variables = {"OMP_NUM_THREADS": "1", "METER": str(file.parent), "BEGAN": str(time.time())}
    with (setting.folder / "output.txt").open("w+") as output:
        started = [
            subprocess.Popen(line, cwd=setting.folder, env=os.environ | variables, stdout=output, stderr=output)
            for line in commands(name, setting)
        ]
        for process in started:
            peak_of(process)  # waits, and ends one that hangs
        output.seek(0)
        if any(process.returncode for process in started) or not file.exists():
            raise RuntimeError(f"{name} failed:\n{output.read()[-3000:]}")
    seen = json.loads(file.read_text(encoding="utf-8"))
    return {"rate": setting.work.global_batch / seen["seconds_per_step"], "peak": seen["peak_bytes"] / 2**20}


def rows(rounds: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """The lines of the table."""
    lines = ["| stage | samples/s | ratio to the plain loop | peak memory of a process, MiB |", "|---|---|---|---|"]
    for name in STAGES:
        if name not in rounds[0]:
            lines.append(f"| {name} | needs GPUs | | |")
            continue
        rate = middle([each[name]["rate"] for each in rounds], 0)
        ratio = middle([each[name]["rate"] / each[PLAIN]["rate"] for each in rounds], 2)
        peak = statistics.median(each[name]["peak"] for each in rounds)
        lines.append(f"| {name} | {rate} | {ratio} | {peak:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="of a run; the first three are not measured")
    parser.add_argument("--batch", type=int, default=128, help="G, a multiple of 2")
    add_precision(parser)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a file for the table, such as benchmarks/results/stages.md")
    given = parser.parse_args()
    work = Work("stages", "cnn", given.batch, given.steps, LEARNING_RATE)
    if given.stage:
        plain(given.data, work, is_parallel=given.stage == PARALLEL, is_bf16=given.precision == "bf16")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in STAGES if name != PARALLEL or torch.cuda.device_count() > 1]
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        setting = Setting(work, Path(temporary), model=Path(), peers=Path(), precision=given.precision)
        (setting.folder / "mnist").symlink_to((given.data / "mnist").resolve())
        (setting.folder / "meter").mkdir()
        for number in range(given.rounds):
            rounds.append({})
            for name in names if number % 2 == 0 else reversed(names):
                rounds[-1][name] = measured(name, setting)
                sys.stderr.write(f"round {number + 1}: {name} {rounds[-1][name]}\n")
    lines = [
        f"`python benchmarks/stages.py --rounds {given.rounds} --steps {given.steps}`, {measured_at(device)}.",
        f"MNIST CNN, {given.precision}, AdamW, G = {work.global_batch}, medians (quartiles).",
        "",
        *rows(rounds),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
