"""The page of an opened step in a real browser, wide and narrow, with nothing from outside."""

from browsing import DESK, IN_BROWSER, PHONE, keep
from running import SHORT, lockstep

pytestmark = IN_BROWSER


def test_samples_and_tables(browser, tmp_path):
    (tmp_path / "c.yaml").write_text("data: {kind: digits}\nmodel: {kind: cnn}\n")
    for words in (("train", "c.yaml", "run.name=one", *SHORT), ("replay", "runs/one", "--step", "20")):
        done = lockstep(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    browser.get((tmp_path / "replay-20.html").as_uri())
    assert browser.execute_script("return [...document.images].map(i => i.naturalWidth)") == [8] * 10
    assert [len(each.find_elements("css selector", "tr")) for each in browser.find_elements("tag name", "table")][
        1
    ] == 5
    keep(browser, "replay-desk", DESK)
    keep(browser, "replay-phone", PHONE)
