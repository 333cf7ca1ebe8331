"""Trainings of the tests of a GPU: each is the real command in a new interpreter, and several run at a time.

Processes share the GPU, however many there are. With LOCKSTEP_TEST_DEVICE=cpu all run on the CPU.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
from data_files import write_mnist
from places import DATA, EXAMPLES, GPU_TESTS_ON
from recipe_rows import Row, config_of, make_small_transformer

ON_GPU = GPU_TESTS_ON == "cuda"
LIMIT_SECONDS = 150
AT_ONCE = 3 if (psutil.cpu_count(logical=False) or 1) >= 8 else 1
HERE = f"run.device={GPU_TESTS_ON}"
ENCODER = Row("transformer", "fp32", micro_batch=4, clip=0.1, workers=0, samples=80)
"""A small DistilBERT with dropout on texts of many lengths."""
COMMON = ["launch.max_restarts=0", "evaluate.every_epochs=null", "train.epochs=null", "observe.sinks=[progress,jsonl]"]


def processes(count):
    """The settings for so many processes."""
    shared = ["launch.share_gpus=true"] if ON_GPU and count > 1 else []
    return [f"launch.processes={count}", *shared]


def recipe(name, folder):
    """Config file and settings of a short training of a CNN, on digits or MNIST, or of a language model or encoder."""
    if name == "encoder":
        small = make_small_transformer(folder / "small")
        config = config_of(ENCODER, small)
        (folder / "encoder.yaml").write_text(json.dumps(config))
        return [str(folder / "encoder.yaml"), *COMMON, "train.steps=12"]
    settings = {
        "digits": ["train.steps=24", "data.limit=600"],
        "mnist": [
            f"train.steps={31 if ON_GPU else 3}",
            "data.limit=4000",
            "evaluate.limit=200",
            "train.micro_batch=32",
        ],
        "gpt": [
            "train.steps=12",
            "data.context=64",
            "model.dropout=0.1",
            "train.micro_batch=4",
            "evaluate.limit=32",
            "evaluate.sample_tokens=4",
        ],
    }[name]
    if name == "mnist":
        if not (DATA / "mnist").is_dir():
            write_mnist(folder / "mnist", counts=(("train", 4000), ("t10k", 200)))
        settings = [*settings, f"data.root={DATA if (DATA / 'mnist').is_dir() else folder}"]
    return [str(EXAMPLES / f"{name}.yaml"), *COMMON, *settings]


def command(*words, env=None, folder):
    """Start the command line in a new interpreter, whose output goes to a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *map(str, words)],
        cwd=folder,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*words, env=None, folder):
    """Exit code and output of a command."""
    process = command(*words, env=env, folder=folder)
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def trained(folder, *words, device=HERE, env=None):
    """Train; the summary."""
    code, output = run("train", *words, device, f"run.dir={folder / 'runs'}", env=env, folder=folder)
    assert code == 0, output[-3000:]
    name = next(word for word in words if word.startswith("run.name=")).removeprefix("run.name=")
    return summary(folder, name)


def summary(folder, name):
    found = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert found["status"] == "finished", found
    return found


def digests(folder, runs, base):
    """name -> settings of each run, some at a time; name -> digest of its weights."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {
            name: pool.submit(trained, folder, *base, *settings, f"run.name={name}") for name, settings in runs.items()
        }
        return {name: future.result()["digest"] for name, future in started.items()}


def assert_equal(found):
    assert len(set(found.values())) == 1, found
