"""The report of runs in a real browser: curves, zoom by mouse and keyboard, on a phone, with nothing from outside."""

import json
import re

import pytest
from browsing import DESK, IN_BROWSER, PHONE, keep
from running import SHORT, lockstep

from lockstep.inference.evaluate import evaluation_page, figures
from lockstep.observe.report import report_page, run_files

pytestmark = IN_BROWSER
READ = "[plots[0].scales.x.min, plots[0].scales.x.max]"
RANGE = f"return {READ}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\n")
    for name, rate in (("one", "1e-3"), ("two", "3e-3")):
        ran = lockstep(folder, "train", "c.yaml", f"run.name={name}", f"optim.lr={rate}", *SHORT)
        assert ran.returncode == 0, ran.stderr
    return folder / "runs"


def figure_of(browser, title):
    return next(f for f in browser.find_elements("tag name", "figure") if title in f.text)


def test_curves_are_drawn_and_moved_with_the_mouse(browser, runs):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.get((runs / "one" / "report.html").as_uri())
    titles = [each.text.splitlines()[0] for each in browser.find_elements("tag name", "figcaption")]
    assert titles[0] == "loss" and {"accuracy", "learning rate", "gradient norm", "samples/s"} < set(titles)
    assert len(browser.find_elements("css selector", "figure canvas")) == len(titles)
    loss = figure_of(browser, "loss")
    assert loss.find_element("css selector", ".readout").text == "training · test"
    keys = [each.value_of_css_property("border-top-color") for each in loss.find_elements("css selector", ".key")]
    assert len(set(keys)) == 2
    over = loss.find_element("css selector", ".u-over")
    ActionChains(browser).move_to_element(over).perform()
    readout = loss.find_element("css selector", ".readout").text
    assert re.fullmatch(r"step \d+ · training \d\.\d+ · test \d\.\d+", readout), readout
    whole = browser.execute_script(RANGE)
    ActionChains(browser).move_to_element(over).click_and_hold().move_by_offset(60, 0).release().perform()
    low, high = browser.execute_script(RANGE)
    assert whole[0] < low < high < whole[1]
    assert browser.execute_script("return plots.every(p => p.scales.x.min === plots[0].scales.x.min)")
    loss.find_element("css selector", "button[data-do=all]").click()
    assert browser.execute_script(RANGE) == whole
    keep(browser, "report-desk", DESK)
    keep(browser, "report-phone", PHONE)


def test_curves_are_read_with_the_keyboard(browser, runs):
    from selenium.webdriver.common.keys import Keys

    browser.get((runs / "one" / "report.html").as_uri())
    plot = figure_of(browser, "loss").find_element("css selector", ".plot")
    whole = browser.execute_script(RANGE)
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert figure_of(browser, "loss").find_element("css selector", ".readout").text.startswith("step 2 ")
    plot.send_keys("+")
    low, high = browser.execute_script(RANGE)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    plot.send_keys("0")
    assert browser.execute_script(RANGE) == whole
    values = figure_of(browser, "loss").find_element("css selector", "details")
    values.find_element("tag name", "summary").send_keys(Keys.ENTER)
    assert "training" in values.text and "52" in values.text


def test_runs_side_by_side(browser, runs, tmp_path):
    page = tmp_path / "both.html"
    ran = lockstep(tmp_path, "report", str(runs / "one"), str(runs / "two"), "--out", str(page))
    assert ran.returncode == 0, ran.stderr
    browser.get(page.as_uri())
    differing = browser.find_element("xpath", "//h2[.='Settings that differ']/following::table").text
    assert "optim.lr 0.001 0.003" in differing and "run.name" not in differing
    assert browser.execute_script("return data.charts[0].series.length") == 4
    assert len(figure_of(browser, "loss").find_elements("css selector", ".key")) == 4
    summary = browser.find_element("xpath", "//h2[.='Runs']/following::table")
    assert [each.text for each in summary.find_elements("css selector", "th bdi")] == ["one", "two"]
    browser.set_window_size(1280, 1000)
    assert summary.rect["x"] + summary.rect["width"] < figure_of(browser, "loss").rect["x"]
    keep(browser, "report-two-runs-phone", PHONE)
    keep(browser, "report-two-runs", DESK)


def test_an_evaluation_with_long_names_fits_a_phone(browser, tmp_path):
    classes = [
        {"label": label * 9, "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}
        for label in ("a long name ", "longer")
    ]
    found = {"data": "the test split", "checkpoint": "runs/r", "step": 1, "digest": "0", "samples": 2, "metrics": {}}
    page = tmp_path / "evaluation.html"
    names = [each["label"] for each in classes]
    page.write_text(
        evaluation_page.html(found | {"classes": classes}, [], matrix=figures.confusion([[1, 0], [0, 1]], names))
    )
    browser.get(page.as_uri())
    keep(browser, "evaluation-phone", PHONE)
    assert min(each.rect["width"] for each in browser.find_elements("css selector", "td bdi")) > 100


DEGENERATE = {
    "one step": [(2, 0.5)],
    "one far step": [(10**12, 2.0)],
    "the first step": [(0, 1.0)],
    "far steps": [(0, 1.0), (10**12, 2.0)],
    "equal": [(1, 0.5), (2, 0.5), (3, 0.5)],
    "zero": [(1, 0.0), (2, 0.0)],
    "not finite": [(1, None), (2, None)],
    "subnormal": [(1, 5e-324), (2, 1e-323)],
    "neighbours": [(1, 1.0), (2, 1.0000000000000002)],
    "large neighbours": [(1, 1e15), (2, 1e15 + 0.125)],
    "widest": [(1, -1.7e308), (2, 1.7e308)],
    "widest logarithms": [(1, 5e-324), (2, 1.7e308)],
    "wide logarithms": [(1, 1e-99), (2, 1e99)],
    "powers": [(1, 0.1), (2, 10.0), (3, 10.0), (4, 10.0)],
}


def test_no_range_of_values_freezes_the_page(browser, tmp_path):
    browser.set_page_load_timeout(15)
    browser.set_script_timeout(15)
    (tmp_path / "recipe.yaml").write_text("run: {name: a}\n")
    for name, points in DEGENERATE.items():
        lines = [
            {"kind": kind, "step": step, "loss": value, "accuracy": value}
            for kind in ("step", "evaluation")
            for step, value in points
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        page = tmp_path / "report.html"
        page.write_text(report_page.html([run_files.read(tmp_path)]))
        browser.get(page.as_uri())
        browser.execute_script("for (let i = 0; i < 20; i++) zoom(0.5); zoom(4)")
        low, high = browser.execute_async_script(
            f"const done = arguments[0]; requestAnimationFrame(() => done({READ}))"
        )
        assert low < high, name
        figure_of(browser, "loss").find_element("css selector", "button[data-do=all]").click()
        assert browser.execute_script("return plots.every(p => p.scales.x.min < p.scales.x.max)"), name
