"""Writes docs/man/lockstep.1 from the help of the commands: `make docs`. test_packaging.py compares the two."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.cli._app import contexts

FILE = Path(__file__).parent / "man" / "lockstep.1"
HEAD = r"""
.TH LOCKSTEP 1
.SH NAME
lockstep \- distributed PyTorch training with the same bits on any number of processes
.SH SYNOPSIS
.B lockstep
.I COMMAND
[\fIOPTION\fR ...]
.SH DESCRIPTION
One YAML file describes a training: data, model, strategy, launcher. The same config gives the same weights on any
number of processes, through kills and resumes. Settings of the file are replaced by words of the form
.IR section.key=value .
.SH COMMANDS
"""
FOOT = r"""
.SH EXIT STATUS
0: done. 1: your code or data failed. 2: a setting, file, checkpoint or machine cannot be used. 3: a loss was NaN or
infinite. 4: the weights of the ranks differed. 5: another process or machine was lost. 6: no process made progress.
75: interrupted, with a checkpoint; the same command resumes. 130: Ctrl\-C before the run began.
.SH EXAMPLES
.nf
lockstep init examples/digits
lockstep train digits.yaml run.name=one launch.processes=1
lockstep train digits.yaml run.name=two launch.processes=2
lockstep compare runs/one runs/two
.fi
"""


def page() -> str:
    """The page in roff, with the macros of man(7)."""
    return "\n".join([HEAD.strip(), *_commands(), FOOT.strip(), ""])


def _commands() -> Iterator[str]:
    for name, context in contexts():
        command: Any = context.command
        usage = " ".join(command.collect_usage_pieces(context))
        yield f".SS lockstep {name} {escaped(usage)}"
        yield escaped(inspect.cleandoc(command.help or ""))
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is not None:
                yield f".TP\n\\fB{escaped(record[0])}\\fR\n{escaped(record[1])}"


def escaped(text: str) -> str:
    """Plain text in roff: no hyphenated dashes, no line that begins with a request, no code marks."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"^([.'])", r"\\&\1", re.sub(r"\n\n+", "\n.PP\n", plain), flags=re.MULTILINE).replace("\\&.PP", ".PP")


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(page(), encoding="utf-8")
