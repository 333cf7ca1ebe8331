"""GPUs, as their driver reports them, and settings of NCCL and CUDA."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "machine"
SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine exchange through its memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a machine exchange through its network"),
    "NCCL_IB_DISABLE": ("1", "machines exchange over TCP, not InfiniBand"),
    "NCCL_BLOCKING_WAIT": ("1", "each collective stops the host"),
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel stops the host"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another one"),
}
QUERY = {
    "errors": "ecc.errors.uncorrected.volatile.total",
    "thermal": "clocks_event_reasons.hw_thermal_slowdown",
    "power": "clocks_event_reasons.hw_power_brake_slowdown",
    "used": "memory.used",
    "total": "memory.total",
}
"""Fields of `nvidia-smi --query-gpu`; memory is in MiB."""
QUERY_SECONDS = 20
USED = 0.1
"""Share of a GPU's memory that counts as in use: a desktop takes less."""


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    import torch  # noqa: PLC0415 (slow)

    yield from shared_out(context.processes, torch.cuda.device_count())
    environment = {**os.environ, **context.launch.environment}  # noqa: TID251 (what NCCL reads)
    for name, (value, effect) in SLOW_SETTINGS.items():
        if environment.get(name, "").upper() == value:
            yield Diagnosis.warning(
                "LS-GPU-02",
                f"{name}={value} is set: {effect}",
                f"unset {name}, unless it works around a fault of this machine",
            )
    for number, line in enumerate(_driver_lines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(QUERY):
            yield from health(number, dict(zip(QUERY, fields, strict=True)))


def shared_out(processes: int, gpus: int) -> Iterator[Diagnosis]:
    """Check that each process has its own GPU, where there are any."""
    if gpus and processes > gpus:
        yield Diagnosis.error("LS-GPU-01", f"{processes} processes for {gpus} GPUs", f"set launch.processes={gpus}")


def _driver_lines() -> list[str]:
    """Return a line for each GPU; none where there is no driver, or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def health(number: int, facts: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Check the driver's report on one GPU, where an unknown field is "[N/A]"."""
    if facts["errors"].isdecimal() and int(facts["errors"]):
        yield Diagnosis.error(
            "LS-GPU-03",
            f"GPU {number} has had {facts['errors']} uncorrected memory errors since it was reset",
            "reset or replace it (`nvidia-smi -q -d ECC`): its results cannot be trusted",
        )
    if slowed := [reason for reason in ("thermal", "power") if facts[reason] == "Active"]:
        yield Diagnosis.warning(
            "LS-GPU-04",
            f"GPU {number} runs at a lower clock ({' and '.join(slowed)} slowdown)",
            "look at its cooling and power supply (`nvidia-smi -q -d PERFORMANCE`)",
        )
    if facts["used"].isdecimal() and facts["total"].isdecimal() and int(facts["used"]) > USED * int(facts["total"]):
        yield Diagnosis.warning(
            "LS-GPU-05",
            f"{facts['used']} of {facts['total']} MiB of GPU {number} are in use by other processes",
            "end them (`nvidia-smi`), or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
