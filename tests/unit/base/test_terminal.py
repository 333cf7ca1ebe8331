"""What others have written is shown on a terminal, never obeyed."""

import io
import json
import os
import re

import pytest
from rich.table import Table
from rich.text import Text

from lockstep.base.errors import DataError, printable
from lockstep.base.escaping_console import EscapingConsole, escape_name
from lockstep.data.data_config import ImageSection
from lockstep.data.images import decode
from lockstep.data.sources import _files as files
from lockstep.inference.evaluate import evaluation_table
from lockstep.observe.sinks.progress import readable

HOSTILE = "a\x1b[31mb\x9b2J\r\x07\x00\u202e\n[bold]c"


def printed(*renderables):
    file = io.StringIO()
    console = EscapingConsole(file=file, width=400, force_terminal=True, color_system=None)
    for renderable in renderables:
        console.print(renderable)
    return file.getvalue()


def test_control_characters_are_shown():
    shown = Table("name", title=Text(HOSTILE))
    shown.add_row(HOSTILE)
    shown.add_row(Text(HOSTILE))
    for text in (printed(HOSTILE), printed(Text(HOSTILE)), printed(shown), printable(HOSTILE)):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
        assert "\\x1b[31mb\\x9b2J" in text
        assert "[bold]c" in text
    assert "\n" not in escape_name(HOSTILE)


def test_an_evaluation_with_hostile_names():
    file = io.StringIO()
    one = {"label": HOSTILE, "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 3}
    found = {"samples": 3, "data": HOSTILE, "metrics": {HOSTILE: 1.0}, "classes": [one]}
    evaluation_table.show(found, EscapingConsole(file=file, width=400))
    assert "\x1b" not in file.getvalue()
    assert file.getvalue().count("\\n[bold]c") == 3
    assert "\n" not in readable({HOSTILE: 1.0, "loss": 2.0})


def test_a_pipe_among_images_is_told(tmp_path):
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "1.png")
    with pytest.raises(DataError, match=r"1.png is no file but a pipe"):
        files.build(files.Config(kind="files", train=tmp_path, test=tmp_path), "train")
    os.mkfifo(tmp_path / "train.csv")
    with pytest.raises(DataError, match=r"train.csv is a pipe or a device"):
        files.build(files.Config(kind="files", train=tmp_path / "train.csv"), "train")


@pytest.mark.parametrize(
    ("size", "said"), [((10**5, 10**5), "more than 64,000,000 pixels each"), ((8000, 7999), "GiB")]
)
def test_images_that_cannot_be_held_are_told(size, said):
    section = ImageSection(kind="files", image_size=size)
    with pytest.raises(DataError, match=said):
        decode([], 10**8, section, like=[], place=str)


def test_a_line_that_is_nested_too_deeply_is_told(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"text": "a", "label": 1}) + "\n" + '{"text":' + "[" * 200_000)
    with pytest.raises(DataError, match="line 2: it is nested too deeply"):
        files.build(files.Config(kind="files", train=file), "train")
