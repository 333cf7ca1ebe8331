"""The line that says when, on which machine and of which commit a benchmark's figures are."""

import argparse
import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import psutil
import torch

from lockstep.core.distributed.process_group import device_model


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the option of a benchmark whose trainings are in bf16 unless told otherwise."""
    what = "of the trainings; products in bf16 are slower than in fp32 on a processor without instructions for them"
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help=what)


def machine() -> str:
    """Processor, cores, number formats and memory of this machine."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    bf16 = next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), "no bf16 instructions")
    memory = psutil.virtual_memory().total / 2**30
    model = device_model(torch.device("cpu"))
    return f"{model}, {os.cpu_count()} cores ({platform.machine()}, {bf16}), {memory:.0f} GiB"


def commit() -> str:
    """The commit of this checkout, and whether its files differ from it; "unknown" outside of a checkout."""
    line = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    try:
        return subprocess.run(
            line, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measured_at(device: torch.device | None = None) -> str:
    """For the head of every results file, as "measured 2026-11-30 at commit 1a2b3c4 on ..."; `device`: a GPU."""
    on = f"{device_model(device)}, " if device is not None and device.type == "cuda" else ""
    when = datetime.now()
    return f"measured {when:%Y-%m-%d} at commit {commit()} on {on}{machine()}, torch {torch.__version__}"
