"""`lockstep tune` on real steps: what fits by real memory, real kills and refusals; sweeps that learn, diverge and idle."""

import math
import os
import re
import signal
import tempfile
import threading
import time
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from lockstep.base import trust
from lockstep.base.world import World
from lockstep.cli import _app
from lockstep.recipe import build, recipe_trust
from lockstep.recipe import recipe as recipes
from lockstep.tools.tune import trial_process
from lockstep.tools.tune.learning_rate_finder import no_rate, svg
from lockstep.tools.tune.loss_curve import Curve, rates_between
from lockstep.tools.tune.micro_batch_finder import TrialRow, candidates, largest, reasons, recommended
from lockstep.tools.tune.trial_process import TrialRequest, longest

MODEL = """
import os
import resource
import signal
import time

import numpy as np
from torch import nn

from lockstep import DataSpec


class Wide(nn.Module):
    '''Few weights, and 0.1 GB of activations a sample: three tensors of 33.8 MB at a time.'''

    def __init__(self, classes, options):
        super().__init__()
        self.scale, self.head = nn.Linear(64, 64), nn.Linear(64, classes)
        self.norm = nn.BatchNorm1d(64) if options.get("normed") else nn.Identity()
        self.options = options

    def forward(self, batch):
        x = batch["image"].flatten(1) / 255
        time.sleep(self.options.get("pauses", {}).get(f"{len(x)} samples", 0))
        if len(x) == self.options.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if len(x) == self.options.get("refused"):
            now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now, now))
        wide = self.norm(self.scale(x)).repeat(1, self.options.get("width", 132_000)).relu()
        logits = self.head(wide.view(len(x), -1, 64).mean(1))
        return logits * self.options.get("factor", 1.0)


def build(options, spec):
    return Wide(len(spec.labels), options)


class Rows:
    '''Lengths of 1 to 1000 in no order.'''

    spec = DataSpec(modality="any", labels=("a", "b"))
    lengths = np.random.default_rng(0).permutation(1000) + 1

    def __len__(self):
        return 1000

    def __getitems__(self, indices):
        return {"x": [np.ones(self.lengths[i], dtype=np.float32) for i in indices], "label": np.zeros(len(indices), int)}


def source(options, split):
    return Rows()
"""
CONFIG = """
data: {kind: digits, limit: 400}
model: {kind: user, file: model.py}
train: {global_batch: 60, micro_batch: 1}
launch: {processes: 12}
"""


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Runs `lockstep tune` in a folder with a model and a config -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "digits.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\n")
    before = list(tmp_path.iterdir())

    def run(*arguments, leaves=()):
        result = CliRunner().invoke(_app.app, ["tune", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        made = [path.name for path in tmp_path.iterdir() if path not in before and path.name != "__pycache__"]
        assert made == [*leaves]  # no run, no weights
        return result.exit_code, result.stdout, result.stderr

    return run


def rows_of(output):
    """The table of micro-batches: m -> (peak in GB, verdict)."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {int(m): (float(peak.strip("> GB") or 0), verdict) for m, _, peak, _, verdict in cells}


def lines_of(output):
    """The lines for the config, as they would be read."""
    return yaml.safe_load(output.partition("Lines for the config")[2].partition("\n")[2])


# ---------------------------------------------------------------------------------------------- micro-batch


@pytest.mark.parametrize("global_batch", [1, 2, 48, 64, 96, 97, 120, 1000])
def test_the_search_finds_the_largest_in_few_trials(global_batch):
    known = candidates(global_batch, samples=10**6)
    assert all(global_batch % m == 0 or m.bit_count() == 1 for m in known) and 37 not in known
    for room in range(1, global_batch + 5):
        tried = []
        found = largest(known, lambda m, room=room, tried=tried: tried.append(m) or m <= room)
        assert found == max(m for m in known if m <= room)
        assert len(tried) == len(set(tried)) <= 2 * math.log2(global_batch) + 2
    assert largest(known, lambda m: False) is None
    assert largest(known, lambda m: m != 1) == (global_batch if global_batch > 1 else None)  # BatchNorm
    assert candidates(64, samples=50) == [1, 2, 4, 8, 16, 32]


def test_the_table_is_read_in_sentences():
    def row(m, speed=100.0, verdict="fits"):
        return TrialRow(m=m, verdict=verdict, peak_bytes=1, samples_per_second=speed, why="Why." * (verdict == "fails"))

    def read(rows, *, global_batch=96, processes=1):
        run = {"global_batch": global_batch, "processes": processes}
        m = recommended(rows, **run)
        return m, *reasons(rows, m, **run)

    assert read([row(1), row(48), row(64)]) == (
        48,
        "train.micro_batch=48 fits and divides 96; 64, the largest, does not.",
    )
    assert read([row(1, 10.0), row(64)])[0] == 64
    assert "holds 32 samples only" in read([row(1, 10.0), row(64)])[2]
    assert read([row(32, 120.0), row(48)]) == (
        *(
            32,
            "train.micro_batch=32 is the fastest, with 1.20 times the samples per second of 48, the largest that fits.",
        ),
    )
    assert read([row(32, 102.0), row(48)]) == (
        48,
        "train.micro_batch=48 is the largest that fits.",
    )  # no more than noise
    assert read([row(24), row(48), row(96, 150.0)], processes=4) == (
        *(24, "train.micro_batch=24 is the fastest with which each of 4 processes has work."),
    )
    assert read([row(24), row(48, 90.0), row(96, 90.0)])[0] == 24
    assert read([row(1), row(2)], global_batch=2, processes=4) == (
        *(1, "train.micro_batch=1 is about as fast as any that fits.", "With it only 2 of 4 processes have work."),
    )
    assert read([row(1, verdict="fails"), row(2)])[-1] == "m = 1 fails: Why."


def test_what_fits_is_found_by_real_memory(tune):
    """Of six micro-batches 8 is killed, 6 is refused memory by the system, 5 takes more than the budget."""
    code, out, err = tune("c.yaml", "train.global_batch=1", "launch.processes=1", "--micro-batch")
    assert (code, err) == (0, ""), out + err
    assert re.search(r"80% of the [0-9.]+ GB that are available, for 1 process\)", out)
    room = round(rows_of(out)[1][0] + 3.5 * 0.101, 2)

    settings = "model.options={killed: 8, refused: 6, pauses: {1 samples: 0.3, 2 samples: 0.6}}"  # 4 is faster, whatever else runs
    code, out, err = tune("c.yaml", settings, "--micro-batch", "--memory", room)
    assert (code, err) == (0, ""), out + err
    rows = rows_of(out)
    assert {m: verdict for m, (_, verdict) in rows.items()} == {
        **{1: "fits", 2: "fits", 4: "fits"},
        **{5: "over the budget", 6: "out of memory", 8: "killed"},
    }
    peaks = [rows[m][0] for m in (1, 2, 4, 5)]
    assert peaks == sorted(peaks) and peaks[2] <= room <= peaks[3], peaks
    assert 0.25 < peaks[2] - peaks[0] < 0.35, peaks  # three samples more
    assert f"within {room:.2f} GB for each process (--memory)" in out
    assert "train.micro_batch=4 is the largest that fits." in out
    assert "another one gives other weights" in out
    assert lines_of(out) == {"train": {"micro_batch": 4}}


def test_a_single_sample_that_batchnorm_refuses_is_passed_over(tune):
    settings = ["model.options={normed: true, width: 10}", "train.global_batch=2", "launch.processes=1"]
    code, out, err = tune("c.yaml", *settings, "--micro-batch")
    assert (code, err) == (0, ""), out + err
    assert {m: verdict for m, (_, verdict) in rows_of(out).items()} == {1: "fails", 2: "fits"}
    assert "m = 1 fails: ValueError: Expected more than 1 value per channel" in out


@pytest.mark.parametrize(
    ("memory", "width", "words"),
    [(0.05, 1, "not even the model fits in memory"), (0.8, 2_000_000, "not even train.micro_batch=1 fits")],
)
def test_too_little_memory_for_anything_is_reported(tune, memory, width, words):
    settings = [f"model.options.width={width}", "train.global_batch=1", "launch.processes=1"]
    code, out, err = tune("c.yaml", *settings, "--micro-batch", "--memory", memory)
    assert code == 2 and "Traceback" not in out + err
    assert f"{words}: over the budget, with more than 0." in err and f" GB ({memory:.2f} GB, --memory)\n" in err
    assert "Allow more with --memory, or take a smaller model or shorter samples." in err


def test_an_error_in_the_users_code_is_shown_as_it_is(tune):
    code, _, err = tune(
        "c.yaml", "model.options={factor: x}", "train.global_batch=1", "launch.processes=1", "--micro-batch"
    )
    assert code == 1
    assert 'model.py", line' in err and "TypeError" in err
    assert err.endswith("the trial of train.micro_batch=1 ended with exit code 1\n")


def test_the_longest_samples_are_what_a_trial_begins_with(lone, tune, tmp_path):
    """And its steps are the run's own afterwards."""
    data = ["data={kind: user, file: model.py}", "model.options={width: 1}"]
    recipe = recipes.load(tmp_path / "c.yaml", [*data, "parallel.kind=single", "launch.processes=1"])
    trust.own(recipe_trust.code_of_files(recipe))
    parts = build.assemble(recipe, World(), torch.device("cpu"))
    first, own = next(longest(replace(parts, total_steps=3)).steps(0)), next(parts.steps(0))
    assert min(m.batch["x"].shape[1] for m in first) > 1000 - len(first) == 940
    assert sorted(m.indices for m in own) == sorted((row,) for shard in parts.order.shards(0) for row in shard)


# ---------------------------------------------------------------------------------------------- learning rate


@pytest.mark.core
def test_a_sweep_finds_a_rate_and_draws_it(tune, tmp_path):
    """The digits learn with rates from 1e-3 to 1.5e-2; the linear rule stands between optim.lr and what is used."""
    settings = ["optim.base_batch=32", "run.name=mine", "--out", "curve.svg"]
    code, out, err = tune("digits.yaml", *settings, "--lr", leaves=["curve.svg"])
    assert (code, err) == (0, ""), out + err
    found = re.search(r"optim.lr=(\S+) \(the rate used is then (\S+): the linear rule multiplies by 2\)", out)
    before, used = map(float, found.groups())
    assert before == pytest.approx(used / 2, rel=0.05)
    assert 1e-3 < used < 2e-2, out
    lowest = float(re.search(r"the loss is lowest, \S+, at optim.lr=(\S+):", out)[1])
    assert lowest > before
    assert lines_of(out) == {"optim": {"lr": before}}

    picture = ElementTree.parse(tmp_path / "curve.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    title = "Learning-rate range test: cnn on digits, adamw, 64 samples a step"
    words = [text.text for text in picture.iter(f"{name}text")]
    assert picture.find(f"{name}title").text == title and title in words
    assert {"training loss", "smoothed", "learning rate used (optim.lr times 2), log scale"} <= set(words)
    assert f"suggestion {used:.2g}: falls fastest" in words
    references = re.findall('href="(.)', (tmp_path / "curve.svg").read_text())
    assert set(references) == {"#"}, "nothing from outside"


@pytest.mark.parametrize(
    ("settings", "words", "has_picture"),
    [
        (["model.options.factor=0.0"], "the loss falls nowhere between 1e-07 and 10 (from 2.303 to 2.303", True),
        (["model.options.factor=1.0e+39"], "NaN or infinite in the first step, before any update", False),
        (["--from", "30", "--to", "1e6", "optim.kind=sgd", "optim.clip=null"], "Start lower, with --from.", True),
    ],
    ids=["flat", "not finite", "diverges"],
)
def test_a_hopeless_sweep_says_so_instead_of_a_number(tune, settings, words, has_picture):
    small = ["model.options.width=1", "train.global_batch=16", "train.micro_batch=16", "--steps", "20"]
    code, out, err = tune("c.yaml", *small, *settings, "--lr", leaves=["c-lr.svg"] * has_picture)
    assert (code, err) == (1, ""), out + err
    assert "No rate: " in out and words in out, out
    assert "Lines for the config" not in out and "optim.lr=" not in out


def bowl(steps=100, depth=1.5, noise=0.0, until=100):
    """A sweep as it should be: flat, down around 1e-3, up from 1e-1."""
    rates = rates_between(1e-7, 10.0, steps)
    x = np.log10(rates)
    losses = 2.3 - depth / (1 + np.exp(-3 * (x + 3))) + 10 ** (3 * (x + 0.5))
    losses += noise * np.random.default_rng(0).normal(size=steps)
    return rates, tuple(losses[:until].tolist())


def test_a_curve_is_read_where_it_falls_fastest():
    curve = Curve.of(*bowl(noise=0.03, until=93))
    assert 1e-3 < curve.rates[curve.steepest] < 1e-2 < curve.rates[curve.lowest] < 0.2
    assert curve.end == "diverged"
    assert Curve.of(*bowl(depth=0.0, noise=0.03, until=80)).steepest is None
    assert Curve.of(*bowl(depth=0.05, noise=0.03, until=80)).steepest is None
    rates, losses = bowl(until=50)
    assert Curve.of(rates, (*losses, math.nan)).end == "not finite"
    early = Curve.of(rates, (*losses[:4], math.inf))
    assert not early.is_readable and "after 4 steps already" in no_rate(early, rates)


@pytest.mark.parametrize("loss", [0.0, -3.0, 1e-12, 1e30])
@pytest.mark.parametrize("steps", [2, 40])
def test_any_curve_can_be_drawn(loss, steps):
    rates = rates_between(1e-3, 2e-3, 40)
    curve = Curve.of(rates, tuple(loss + abs(loss) * 1e-3 * (number % 3) for number in range(steps)))
    root = ElementTree.fromstring(svg(curve, "<&> é"))
    assert root.find("{http://www.w3.org/2000/svg}title").text == "<&> é"
    assert "nan" not in svg(curve, "")
    assert svg(curve, "x") == svg(curve, "x")


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to look for: --micro-batch, --lr, or both"),
        (["--micro-batch", "--memory", "0"], "--memory 0: give GB above 0, such as --memory 8"),
        (["--micro-batch", "--memory", "-3"], "--memory -3: give GB above 0"),
        (["--micro-batch", "--memory", "nan"], "--memory nan: give GB above 0"),
        (["--lr", "--memory", "8"], "--memory belongs to --micro-batch"),
        (["--lr", "--from", "-1"], "--from -1: a rate is a number above 0"),
        (["--lr", "--from", "1", "--to", "1"], "--from 1 --to 1: --to has to be the larger one"),
        (["--lr", "--to", "inf"], "--to has to be the larger one"),
        (["--lr", "--steps", "9"], "--steps 9: that is too few to see a curve; take 10 or more"),
        (["--lr", "--out", "c.yaml"], "let its name end in .svg"),
        (["--lr", "--out", "no/where.svg"], "--out no/where.svg: there is no folder no; make it"),
        (["--lr", "model.file=no.py"], "there is no file"),
        (["--lr", "train.micro_batch=99"], "train.micro_batch: 99 is more than train.global_batch"),
    ],
)
def test_mistakes_are_told_in_one_line(tune, arguments, words):
    code, out, err = tune("c.yaml", *arguments)
    assert code == 2 and words in err and "Traceback" not in err, err
    assert err.count("\n") == 1
    assert not out or words == "there is no file"


def test_a_signal_ends_it_and_leaves_nothing(tune, tmp_path, monkeypatch):
    """No process either: every test is looked at for that."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def interrupt():
        while not list((tmp_path / "tmp").glob("lockstep-tune-*/log")):  # which the process of the sweep opens
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    result = tune("digits.yaml", "--lr", "--steps", "100000", leaves=["tmp"])
    thread.join()
    assert (result[0], result[2]) == (130, "interrupted\n")
    # A folder of multiprocessing's own stays until this process ends.
    assert not [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("pymp-")]


def test_a_trial_that_prints_and_crashes_is_quoted(tmp_path):
    """SIGSEGV says nothing about memory."""
    (tmp_path / "model.py").write_text("import os\nprint('my last words', flush=True)\nos.kill(os.getpid(), 11)\n")
    (tmp_path / "c.yaml").write_text(CONFIG)
    recipe = recipes.load(tmp_path / "c.yaml", [f"model.file={tmp_path}/model.py"])
    trust.own(recipe_trust.code_of_files(recipe))
    done = trial_process.run(TrialRequest(recipe=trial_process.alone(recipe, data={}, train={"steps": 1})))
    assert done.verdict == "fails"
    assert str(done.failure("the trial")) == "my last words\nthe trial ended with exit code -11"
