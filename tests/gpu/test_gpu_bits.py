"""On a GPU, the weights are a function of the config and the data: not of processes, strategy, kills or observers."""

import signal
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from gpu_runs import (
    HERE,
    LIMIT_SECONDS,
    ON_GPU,
    assert_equal,
    command,
    digests,
    processes,
    recipe,
    run,
    summary,
    trained,
)

from lockstep.core.reduction.all_reduce import AllReduce

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(6 * LIMIT_SECONDS)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["mnist", "gpt", "encoder", "digits"])
def test_weights_do_not_depend_on_the_number_of_processes(name, precision, tmp_path):
    runs = {f"w{count}": processes(count) for count in (1, 2, 3)}
    assert_equal(digests(tmp_path, runs, [*recipe(name, tmp_path), f"train.precision={precision}"]))


@pytest.mark.parametrize(("kind", "counts"), [("single", (1,)), ("pipeline", (1, 2))])
def test_a_strategy_gives_the_weights_of_ddp(kind, counts, tmp_path):
    runs = {"ddp": processes(1)}
    runs |= {f"{kind}-{count}": [*processes(count), f"parallel.kind={kind}"] for count in counts}
    assert_equal(digests(tmp_path, runs, recipe("gpt", tmp_path)))


@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_fsdp_gives_the_weights_of_ddp(name, tmp_path):
    fsdp = "parallel.kind=fsdp"
    runs = {"ddp": processes(1), "one": [*processes(1), fsdp], "two": [*processes(2), fsdp]}
    runs["offload"] = [*processes(2), fsdp, "parallel.offload=true"]
    assert_equal(digests(tmp_path, runs, recipe(name, tmp_path)))


def test_compiled_blocks_do_not_depend_on_the_number_of_processes(tmp_path):
    runs = {f"w{count}": processes(count) for count in (1, 2)}
    assert_equal(digests(tmp_path, runs, [*recipe("gpt", tmp_path), "train.compile=true"]))


def test_a_killed_run_ends_with_the_weights_of_one_left_alone(tmp_path):
    """Kill -9 of the whole family after a checkpoint; resumed on another number of processes."""
    base = [*recipe("mnist", tmp_path), "train.steps=31", "checkpoint.every_steps=4"]
    whole = trained(tmp_path, *base, *processes(1), "run.name=whole")
    words = ["train", *base, HERE, f"run.dir={tmp_path / 'runs'}", "run.name=killed"]
    process = command(*words, *processes(2), folder=tmp_path)
    saved = tmp_path / "runs" / "killed" / "checkpoints" / "step-000000004"
    end = time.monotonic() + LIMIT_SECONDS
    while not saved.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    code, output = run(*words, *processes(3), folder=tmp_path)
    assert code == 0 and "resumed after step" in output, output
    assert summary(tmp_path, "killed")["digest"] == whole["digest"]


def test_a_checkpoint_moves_to_the_cpu_and_back_only_with_the_drift_named(tmp_path):
    """In a trial on the CPU, the number of threads stands for the other device."""
    base = [*recipe("digits", tmp_path), *processes(1), "schedule.shape=constant", "run.name=moved"]
    away, field = (["run.device=cpu"], "device_model") if ON_GPU else ([HERE, "run.threads=2"], "threads")
    trained(tmp_path, *base, "train.steps=6")
    words = ["train", *base, f"run.dir={tmp_path / 'runs'}", "train.steps=12", *away]
    code, output = run(*words, folder=tmp_path)
    assert code == 2 and field in output and "--allow-drift" in output, output
    code, output = run(*words, "--allow-drift", folder=tmp_path)
    assert code == 0, output
    there = summary(tmp_path, "moved")
    back = trained(tmp_path, *base, "train.steps=18", "--allow-drift")
    assert field in [each["field"] for each in there["drift"]]
    drift = [(each["step"], each["now"]) for each in back["drift"] if each["field"] == field]
    assert [step for step, _ in drift] == [6, 12] and drift[0][1] != drift[1][1]
    assert back["steps"] == 18 and (back["device"] != there["device"]) == ON_GPU


@pytest.mark.filterwarnings("default::FutureWarning")  # of names of torch that change
def test_the_tree_adds_over_nccl_on_one_process():
    """All of NCCL's path that one GPU can run: two processes on it cannot be connected by NCCL."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype in (torch.float32, torch.float64, torch.int64):
            tree = AllReduce([frozenset(range(4))], frozenset(range(4)), dist.group.WORLD)
            values = torch.arange(1001, device=device).to(dtype)
            assert torch.equal(tree._collective([values.clone()]), values), dtype
    finally:
        dist.destroy_process_group()
