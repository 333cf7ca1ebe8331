"""`lockstep serve` against the handler of the usual tutorial, at several concurrencies, in turns.

python benchmarks/serving.py EXPORT [--graphs FOLDER ...] [--texts FILE.csv] [--seconds 6] [--repetitions 3]
                             [--out FILE.md]

EXPORT: a folder that `lockstep export` wrote for a text model (export.kind=pretrained); FOLDER: the same model as
another kind (export.kind=onnx, export.dtype=int8), to be served besides. The tutorial's handler loads
the same folder with plain transformers and runs the model once per request: as `def` (FastAPI's thread pool) and as
`async def` (in the event loop); ratios are against the better of the two. A client in a process of its own keeps a
number of connections busy; all share the machine.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from http_load import load
from measured_at import measured_at
from networks import free_port

from lockstep.inference.export.export_facts import read

CONCURRENCIES = (1, 8, 32, 128)
TUTORIAL = """
import sys
import torch, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

folder, port, kind = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
longest = min(128, model.config.max_position_embeddings)
app = FastAPI()


class Request(BaseModel):
    text: str


def answer(request):
    inputs = tokenizer(request.text, truncation=True, max_length=longest, return_tensors="pt")
    with torch.no_grad():
        probabilities = model(**inputs).logits.softmax(-1)[0]
    best = int(probabilities.argmax())
    return {"label": model.config.id2label[best], "confidence": float(probabilities[best])}


if kind == "def":
    @app.post("/predict")
    def predict(request: Request):
        return answer(request)
else:
    @app.post("/predict")
    async def predict(request: Request):
        return answer(request)


@app.get("/health")
def health():
    return {}


uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
"""
TUTORIALS = ("tutorial, def", "tutorial, async def")


def commands(export: Path, graphs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Name of a server -> its command, without the port."""
    serve = [sys.executable, "-m", "lockstep", "serve", "--port", "PORT"]
    return {
        TUTORIALS[0]: [sys.executable, "-c", TUTORIAL, str(export), "PORT", "def"],
        TUTORIALS[1]: [sys.executable, "-c", TUTORIAL, str(export), "PORT", "async"],
        "lockstep, fp32": [*serve, str(export)],
        "lockstep, bf16": [*serve, str(export), "--dtype", "bf16"],
        **{f"lockstep, {read(path).kind} {read(path).dtype} ({path.name})": [*serve, str(path)] for path in graphs},
    }


@contextmanager
def running(command: list[str]) -> Iterator[int]:
    """A server -> its port."""
    port = free_port()
    process = subprocess.Popen([str(port) if word == "PORT" else word for word in command], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 90
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            time.sleep(0.2)
        else:
            raise SystemExit(f"did not start: {command[:4]}")
        yield port
    finally:
        process.terminate()
        process.wait(30)


def measure(port: int, texts: list[str], *, connections: int, seconds: float) -> tuple[float, float, float]:
    """Requests a second, and the 50th and 99th percentile of their milliseconds; asked from another process."""
    with ProcessPoolExecutor(1) as pool:
        pool.submit(load, port, texts, connections=connections, seconds=min(1.0, seconds)).result()
        seen = pool.submit(load, port, texts, connections=connections, seconds=seconds).result()
    cuts = statistics.quantiles(seen.seconds, n=100, method="inclusive")
    return len(seen.seconds) / seen.wall, cuts[49] * 1e3, cuts[98] * 1e3


def texts_of(file: Path | None) -> list[str]:
    """Of the last column of a CSV file without a header, as AG News comes; else made up, as long as headlines are."""
    if file is None:
        return [" ".join(f"word{(n * 31 + k * 7) % 997}" for k in range(5 + n % 30)) for n in range(500)]
    with file.open(encoding="utf-8") as rows:
        return [" ".join(row[1:]) for row in csv.reader(rows)][:2000]


def features() -> str:
    """What of the processor decides how fast few bits are."""
    has = torch.cpu.get_capabilities()
    return ", ".join(f"{'with' if has.get(name) else 'without'} {name}" for name in ("amx_bf16", "avx512_vnni"))


def middle(repetitions: list[tuple[float, float, float]]) -> list[float]:
    """The median of each figure."""
    return [statistics.median(each) for each in zip(*repetitions, strict=True)]


def table(results: dict[tuple[str, int], list[tuple[float, float, float]]], names: list[str]) -> str:
    """Medians over the repetitions, and ratios to the better tutorial, as Markdown."""
    lines = [
        "| concurrency | server | requests/s (range) | p50 ms | p99 ms | requests/s, ratio | p50, ratio | p99, ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for connections in CONCURRENCIES:
        found = {name: middle(results[name, connections]) for name in names}
        best = max((found[name] for name in TUTORIALS), key=lambda each: each[0])
        for name in names:
            rate, p50, p99 = found[name]
            rates = [each[0] for each in results[name, connections]]
            lines.append(
                f"| {connections} | {name} | {rate:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {p50:.1f} | {p99:.1f} "
                f"| {rate / best[0]:.2f} | {p50 / best[1]:.2f} | {p99 / best[2]:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path)
    parser.add_argument("--graphs", type=Path, nargs="*", default=())
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts, results = texts_of(options.texts), {}
    servers_of = commands(options.export, options.graphs)
    with ExitStack() as servers:
        ports = {name: servers.enter_context(running(words)) for name, words in servers_of.items()}
        for repetition in range(options.repetitions):
            for connections in CONCURRENCIES:
                for name, port in ports.items():
                    found = measure(port, texts, connections=connections, seconds=options.seconds)
                    results.setdefault((name, connections), []).append(found)
                    sys.stderr.write(f"{repetition} {connections:4} {name:20} {found[0]:7.1f}/s {found[2]:8.1f} ms\n")
    said = table(results, list(ports))
    facts = (
        f"Figures {measured_at()}, {features()}, {torch.get_num_threads()} threads, medians of {options.repetitions} "
        f"repetitions of {options.seconds:g} s"
    )
    text = f"# Serving\n\n{facts}.\n\n{said}\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
