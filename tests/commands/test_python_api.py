"""lockstep.load, train, evaluate and export in a script: the page's example, answers as those of a server, types."""

import asyncio
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import venv
from importlib.util import find_spec

import httpx
import numpy as np
import pytest
import warm
from exporting import text_case
from PIL import Image
from places import ROOT
from running import lockstep as command
from served import as_text, image_export, png

import lockstep
from lockstep.base.errors import ConfigError, DataError, ModelError, UserError
from lockstep.inference import trained_model
from lockstep.inference.serving import app
from lockstep.inference.serving.service import ServedModel, Settings, service_of

EXAMPLE, GENERATING = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
GPT = {
    "data": {"kind": "text", "context": 48},
    "model": {"kind": "gpt", "layers": 2, "width": 32, "heads": 2},
    "train": {"steps": 20, "global_batch": 16, "micro_batch": 8},
    "optim": {"lr": 0.01},
    "evaluate": {"sample_tokens": 0},
    "launch": {"processes": 1},
}
PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


def script(folder, text):
    """Run it as a file, without a guard, in a process forked from a warm one -> what it prints."""
    (folder / "script.py").write_text(text)
    done = warm.run(["script.py"], cwd=folder, timeout=180, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def trained(folder, config, *settings):
    """A run of the command line."""
    (folder / "c.yaml").write_text(json.dumps(config))
    done = command(folder, "train", "c.yaml", "run.name=gpt", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "gpt"


def asked(export, path, bodies):
    """What a server of a model answers to each."""

    async def ask(service):
        transport = httpx.ASGITransport(app=app.build(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = [await client.post(path, json=body) for body in bodies]
        assert {each.status_code for each in found} == {200}, found
        return [each.json() for each in found]

    service = service_of(ServedModel(trained_model.loader(export), seconds=60), Settings(port=0))
    try:
        return asyncio.run(ask(service))
    finally:
        service.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_export(tmp_path_factory.mktemp("api") / "export")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("gpt"), GPT)


@pytest.mark.timeout(200)
def test_the_pages_example(tmp_path):
    """And what a process of an evaluation cannot do is raised in the script."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "0").mkdir()
    (tmp_path / "broken" / "0" / "a.png").write_bytes(b"no image")
    more = """
    import json, pathlib
    from lockstep.base.errors import UserError
    try:
        lockstep.evaluate(export, "launch.processes=1", file="broken")
    except UserError as error:
        print("refused:", error)
    shown = [run.summary, result.details, [str(each) for each in run.checkpoints]]
    pathlib.Path("found.json").write_text(json.dumps(shown))
    """
    output = script(tmp_path, EXAMPLE + textwrap.dedent(more))
    summary, details, checkpoints = json.loads((tmp_path / "found.json").read_text())
    run = tmp_path / "runs" / "digits"
    assert summary["world_size"] == 2
    assert details["metrics"] == summary["evaluation"]
    assert checkpoints == [str(run / "checkpoints" / f"step-{summary['steps']:09}")]
    lines = output.splitlines()
    assert f"{summary['evaluation']['accuracy']} 355 {run / 'evaluation.html'}" in lines
    at = lines.index("True")  # the export has the run's digest
    predicted = [line.split()[0] for line in lines[at + 1 : at + 6]]
    assert sum(one == other for one, other in zip(predicted, "90898", strict=True)) >= 4
    assert f"refused: {tmp_path / 'broken' / '0' / 'a.png'} cannot be read as an image" in output
    done = command(tmp_path, "evaluate", "runs/digits")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "evaluation.json").read_text()) == details


def test_images_in_any_form(images, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(png(PIXELS))
    model = lockstep.load(images)
    colours = np.stack([PIXELS] * 3, -1)
    forms = [file, str(file), file.read_bytes(), Image.open(file), PIXELS, PIXELS[None], PIXELS[:, :, None], colours]
    answers = [model.predict(each) for each in [*forms, colours.transpose(2, 0, 1)]]
    assert isinstance(answers[0], lockstep.ClassAnswer)
    assert answers == [answers[0]] * 9
    assert model.labels == model.facts.labels == tuple(answers[0].probabilities)
    assert model.predict([]) == []


def test_answers_are_those_of_a_server(images):
    files = [png(np.roll(PIXELS, n, 0)) for n in range(5)]
    model = lockstep.load(images)
    served = asked(images, "/predict", [{"image": as_text(each)} for each in files])
    alone = [{**model.predict(each).model_dump(), "model": model.facts.title} for each in files]
    assert alone == served
    for batch in (1, 2, 64):  # which changes the last bits
        found = model.predict(tuple(files), batch=batch)
        for one, other in zip(found, served, strict=True):
            assert one.probabilities == pytest.approx(other["probabilities"], abs=1e-6)


def test_texts(tmp_path, minilm):
    export = tmp_path / "export"
    text_case(tmp_path / "bert", minilm).export(export)
    texts = ["stocks fell", "the striker scored twice in the second half"]
    served = asked(export, "/predict", [{"text": each} for each in texts])
    model = lockstep.load(str(export))
    assert [{**model.predict(each).model_dump(), "model": model.facts.title} for each in texts] == served
    assert [each.label for each in model.predict(texts)] == [each["label"] for each in served]
    for sample, said in (
        (3, "takes texts, not int"),
        (tmp_path, "takes texts, not PosixPath"),
        (["fine", "a\ud800"], "sample 1: character 2 is half of a surrogate pair"),
        (["fine", b"x"], "sample 1: .* takes texts, not bytes"),
    ):
        with pytest.raises(DataError, match=said):
            model.predict(sample)


@pytest.mark.parametrize(
    "sample, said",
    [
        ("nothing.png", "nothing.png cannot be read as an image"),
        ([PIXELS, "nothing.png"], "sample 1: nothing.png cannot be read as an image"),
        (PIXELS.astype(float), r"pixels should be uint8 .* these are float64 \[8, 8\]"),
        (PIXELS[0], r"these are uint8 \[8\]"),
        ([PIXELS, np.zeros((8, 8, 5), np.uint8)], r"sample 1: pixels .* these are uint8 \[8, 8, 5\]"),
        ([3], "sample 0: give an image as the path of a file, its bytes, an image of Pillow, or pixels; not int"),
        (b"no image", "the image cannot be read as an image"),
    ],
)
def test_wrong_samples_are_told(images, sample, said):
    with pytest.raises(DataError, match=said):
        lockstep.load(images).predict(sample)


def test_what_is_no_model_is_told(images, tmp_path):
    with pytest.raises(ModelError, match="generates no text: use predict"):
        lockstep.load(images).generate("a")
    for wrong in (lockstep.load, lockstep.evaluate, lockstep.export):
        with pytest.raises(UserError, match="there is no such folder"):
            wrong(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no split 'tset' — did you mean 'test'"):
        lockstep.evaluate(images, split="tset")
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'tarin'"):
        lockstep.tarin  # noqa: B018


def test_completions(gpt):
    run = lockstep.Run(gpt)
    model = run.load()
    options = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.95, "seed": 3}
    one = model.generate("The list", **options)
    assert (one.tokens, one.seed, one.finish, one.model) == (20, 3, "length", model.facts.title)
    assert model.generate(["The list", "A tuple"], **options)[0] == one
    assert "".join(model.stream("The list", **options)) == one.text
    assert asked(gpt, "/generate", [{"prompt": "The list", **options}]) == [one.model_dump()]
    greedy = model.generate("The list", max_tokens=64, temperature=0).text
    assert model.predict("The list").text == model.predict(["The list"])[0].text == greedy
    assert one.text[:5] not in model.generate("The list", stop=[one.text[:5]], **options).text
    export = lockstep.export(run)
    assert export.facts.digest == run.summary["digest"]
    assert export.load().generate("The list", **options) == one


def test_what_cannot_be_completed(gpt):
    model = lockstep.load(gpt)
    for prompt, options, said in (
        ("a", {"top_p": 0}, "top_p is 0, and should be above 0 and at most 1"),
        ("a", {"temperature": -1}, "temperature is -1"),
        ("a", {"stop": "x"}, "stop is 'x', and should be several texts"),
        (["a", 3], {}, "sample 1: a prompt is a text, or a list of messages; not int"),
        ([{"role": "user"}], {}, "message 1 has no text 'content'"),
        ([{"role": "user", "content": "a"}], {}, "this model has not learned chats: give a prompt"),
    ):
        with pytest.raises(UserError, match=said):
            model.generate(prompt, **options)


def test_chats(tmp_path):
    chat = [{"role": "user", "content": "one or two?"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 60))
    config = {**GPT, "data": {"kind": "chat", "train": "chats.jsonl", "context": 64}}
    model = lockstep.load(trained(tmp_path, config, "train.steps=5"))
    asked_as = [chat[:1], "one or two?", (dict(chat[0]),)]
    found = [model.generate(each, max_tokens=8, temperature=0) for each in asked_as]
    assert found == [found[0]] * 3


def test_the_pages_language_model(gpt, monkeypatch, capsys):
    monkeypatch.chdir(gpt.parents[1])
    exec(GENERATING)
    streamed = lockstep.load(gpt).generate("The list", max_tokens=30).text
    assert capsys.readouterr().out.endswith(f"]\n{streamed}")


USER = """
import lockstep

run = lockstep.train({"data": {"kind": "digits"}}, processes=2)
model = run.load()
reveal_type(model.predict("a.png"))
reveal_type([each.text for each in model.generate(["a"], temperature=0.5)])
reveal_type(lockstep.evaluate(run).metrics)
reveal_type(run.export().facts.digest)
lockstep.train({}, processes="two")
model.generate("a", temprature=1)
model.predict(3)
lockstep.tarin({})
"""


@pytest.mark.timeout(170)
def test_a_type_checker_sees_the_types(tmp_path):
    """Of the package as it is installed: without py.typed it would see nothing."""
    venv.create(tmp_path / "v", symlinks=True)
    (site,) = (tmp_path / "v").glob("lib/python*/site-packages")
    (site / "lockstep").symlink_to(ROOT / "src" / "lockstep")
    for name in ("numpy", "PIL", "pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
        (site / name).symlink_to(pathlib.Path(find_spec(name).origin).parent)
    (site / "typing_extensions.py").symlink_to(find_spec("typing_extensions").origin)
    (tmp_path / "user.py").write_text(USER)
    line = [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", "v/bin/python", "user.py"]
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=160)
    found = re.findall(
        r"^user.py:(\d+): (?:error|note): (?!Possible|    |No overload.*generate)(.*)", done.stdout, re.M
    )
    assert [(int(line), re.sub(r"lockstep\.[\w.]+\.", "", text)) for line, text in found] == [
        (6, 'Revealed type is "ClassAnswer | ClassesAnswer | NumbersAnswer | WordsAnswer | Generated"'),
        (7, 'Revealed type is "list[str]"'),
        (8, 'Revealed type is "dict[str, float]"'),
        (9, 'Revealed type is "str"'),
        (10, 'Argument "processes" to "train" has incompatible type "str"; expected "int | None"  [arg-type]'),
        (
            11,
            'Unexpected keyword argument "temprature" for overloaded function "generate" of "LoadedModel"; did you mean '
            '"temperature"?  [call-overload]',
        ),
        (12, 'No overload variant of "predict" of "LoadedModel" matches argument type "int"  [call-overload]'),
        (13, 'Module has no attribute "tarin"; maybe "train"?  [attr-defined]'),
    ], done.stdout
