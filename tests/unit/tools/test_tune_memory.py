"""What memory a process can still have, by the machine and by real control groups, and what it has had."""

import os
import pathlib
import subprocess
import sys
import uuid

import psutil
import pytest
import torch

from lockstep.core.host import memory_meter


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_above_counts(tmp_path, version):
    """Files as the kernel lays them; of a container, whose path in /proc is the host's, only the root is there."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    line = "4:cpu,memory:/docker/abc/job\n3:cpuset:/" if version == 1 else "0::/docker/abc/job"
    (tmp_path / "proc" / "self" / "cgroup").write_text(line + "\n")
    names = memory_meter.CGROUP_V1 if version == 1 else memory_meter.CGROUP_V2
    root = tmp_path / "groups" / ("memory" if version == 1 else "")

    def left(**limits):
        for folder, (limit, use, inactive) in limits.items():
            path = root / {"root": ".", "middle": "docker/abc", "own": "docker/abc/job"}[folder]
            path.mkdir(parents=True, exist_ok=True)
            for name, value in zip(names, (limit, use, f"cache 5\n{names[2]} {inactive}\n"), strict=True):
                (path / (name if name != names[2] else "memory.stat")).write_text(f"{value}\n")
        return memory_meter.available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "groups")

    machine = psutil.virtual_memory().available
    assert left() == pytest.approx(machine, rel=0.2)
    assert left(own=("max" if version == 2 else 2**63 - 4096, 1000, 0)) == pytest.approx(machine, rel=0.2)
    assert left(middle=(9000, 1000, 0)) == 8000
    assert left(own=(6000, 4000, 500)) == 2500
    assert left(root=(100, 99, 0)) == 1
    assert left(root=(100, 199, 0)) == 0


GROUPS = pathlib.Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(GROUPS, os.W_OK), reason="a control group for memory cannot be made here")
def test_a_real_control_group_counts():
    lines = pathlib.Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.split(":")[2] for line in lines if ":memory:" in line)
    group = GROUPS / own.lstrip("/") / f"lockstep-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        code = "import os, sys\nfrom lockstep.core.host import memory_meter\nopen(sys.argv[1], 'w').write(str(os.getpid()))"
        command = [sys.executable, "-c", f"{code}\nprint(memory_meter.available_bytes())", str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert 100 << 20 < int(done.stdout) <= 256 << 20
    finally:
        subprocess.run(["rmdir", str(group)], check=False)


def test_the_peak_is_a_processs_own():
    """Not its parent's, which getrusage would give; and not what it holds in the end."""
    code = (
        "from lockstep.core.host.memory_meter import peak_bytes\nbefore = peak_bytes()\nx = b'x' * 300_000_000\ndel x\n"
    )
    code += "print(before, peak_bytes())"
    held = torch.ones(200_000_000)  # 0.8 GB
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert held.sum() > 0
    before, peak = map(int, done.stdout.split())
    assert before < 0.8e9
    assert 0.2e9 < peak - before < 0.4e9
