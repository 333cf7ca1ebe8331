"""What is handed in to Slurm: the generated script, and the example that is the same with other words at its head."""

from pathlib import Path

import yaml

from lockstep.contracts import Request
from lockstep.launch._batch_script import Script
from lockstep.launch.slurm import Config, Slurm

EXAMPLE = Path(__file__).parents[1] / "examples" / "slurm" / "train.slurm"
EVERYTHING = """
kind: slurm
nodes: 2:4
processes: 8
partition: gpu
account: lab
time: 12:00:00
gpus: 8
cpus: 96
memory: 500G
options: [--constraint=a100, --mail-type=FAIL]
modules: [cuda/12.8]
setup: ['export NCCL_IB_HCA=mlx5', 'ulimit -n 65536']
container: registry.example.org#lab/lockstep:1
mounts: [/data, '/scratch/me:/tmp']
warning_seconds: 300
"""
APPTAINER = "{kind: slurm, gpus: 1, container: images/lockstep.sif, container_kind: apptainer, time: 90}"


def example():
    """The script of the same words as examples/slurm/train.slurm."""
    return Script(
        opening=[
            "Trains a config on one machine or several:",
            "",
            "    sbatch examples/slurm/train.slurm CONFIG.yaml [section.key=value ...]",
            "    sbatch --nodes=4 --gres=gpu:8 examples/slurm/train.slurm CONFIG.yaml",
            "",
            "Edit the lines down to `srun` for your cluster. `lockstep train CONFIG.yaml launch.kind=slurm` writes the same",
            "script from the config, and hands it in.",
        ],
        options={
            "job-name": "lockstep",
            "nodes": "1",
            "ntasks-per-node": "1",
            "cpus-per-task": "2",
            "time": "1:00:00",
            "signal": "B:USR1@120",
            "open-mode": "append",
            "output": "%x-%j.out",
            "requeue": None,
        },
        setup=["source .venv/bin/activate"],
        arguments='"${1:?name a config}" launch.kind=slurm "launch.nodes=$SLURM_NNODES" '
        '"run.name=$SLURM_JOB_NAME-$SLURM_JOB_ID" "${@:2}"',
        requeues=100,
    )


def script(text, **place):
    config = Config.model_validate(yaml.safe_load(text))
    request = Request(recipe=Path("/home/me/runs/digits 1/launch.yaml"), arguments=("--resume", "auto"))
    (file,) = Slurm(config, threads=1, shards=8).plan(request).files.values()
    return file
