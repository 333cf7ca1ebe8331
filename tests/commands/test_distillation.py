"""The example of a student and its teacher: what it trains, on one process and on two."""

import json

import pytest
from places import EXAMPLES
from running import lockstep, summary

EXAMPLE = EXAMPLES / "distillation.py"
TEACHER = {
    "data": {"kind": "digits"},
    "model": {"kind": "cnn"},
    "train": {"epochs": 3, "global_batch": 64, "micro_batch": 16},
    "optim": {"lr": 0.003},
}


def run(folder, *arguments):
    done = lockstep(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.matrix
def test_a_student_of_an_export(tmp_path):
    (tmp_path / "teacher.yaml").write_text(json.dumps(TEACHER))
    run(tmp_path, "train", "teacher.yaml", "run.name=teacher", "launch.processes=1")
    run(tmp_path, "export", "runs/teacher", "--to", "teacher")
    options = {"teacher": str(tmp_path / "teacher")}
    student = {
        "model": {"kind": "user", "file": str(EXAMPLE), "options": options},
        "train": {"steps": 120, "global_batch": 64},
        "optim": {"lr": 0.01},
    }
    (tmp_path / "student.yaml").write_text(json.dumps(TEACHER | student))
    for processes in (1, 2):
        run(tmp_path, "train", "student.yaml", f"run.name=w{processes}", f"launch.processes={processes}")
    student["model"]["options"] = options | {"weight": 0.0}
    (tmp_path / "alone.yaml").write_text(json.dumps(TEACHER | student))
    run(tmp_path, "train", "alone.yaml", "run.name=alone", "launch.processes=1")
    one, two, alone = (summary(tmp_path, name) for name in ("w1", "w2", "alone"))
    assert one["digest"] == two["digest"] != alone["digest"]
    assert one["evaluation"]["accuracy"] > 0.8
    run(tmp_path, "export", "runs/w1", "--to", "student")
    assert (tmp_path / "student" / "model.safetensors").stat().st_size < 15_000  # no teacher in it
