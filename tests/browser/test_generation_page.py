"""The page of a language model in a real browser: a prompt is completed as a stream, stopped, and refused."""

import re

import pytest
from browsing import DESK, IN_BROWSER, PHONE, keep
from running import lockstep
from served import serving

pytestmark = IN_BROWSER
CONFIG = """
data: {kind: text, context: 64}
model: {kind: gpt, layers: 2, width: 64, heads: 2}
train: {steps: 60, global_batch: 16, micro_batch: 8}
optim: {lr: 0.01}
evaluate: {sample_tokens: 0}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    (folder / "c.yaml").write_text(CONFIG)
    for command in (["train", "c.yaml", "run.name=writer"], ["export", "runs/writer", "--to", "export"]):
        done = lockstep(folder, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    with serving(folder / "export", variables={"LOCKSTEP_API_KEY": ""}) as server:
        yield server


def find(browser, name):
    return browser.find_element("id", name)


def until(browser, words):
    """What the page says of the completion, once it says these."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda _: re.search(words, find(browser, "facts").text))
    return find(browser, "facts").text


def opened(browser, server):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(server.url + "/")
    WebDriverWait(browser, 15).until(lambda _: "bits per byte" in find(browser, "about").text)


def typed(browser, name, text):
    find(browser, name).clear()
    find(browser, name).send_keys(text)


def test_a_prompt_is_completed(browser, server):
    opened(browser, server)
    assert "257 tokens" in find(browser, "about").text
    prompt = "Values <b>are</b> "
    for name, text in {"prompt": prompt, "seed": "7", "max_tokens": "120"}.items():
        typed(browser, name, text)
    find(browser, "ask").click()
    said = until(browser, r"tokens in [\d.]+ s")
    asked = {"prompt": prompt, "seed": 7, "max_tokens": 120, "temperature": 0.8, "top_p": 1}
    expected = server.post("/generate", json=asked).json()
    assert find(browser, "given").get_attribute("textContent") == prompt
    assert find(browser, "made").get_attribute("textContent") == expected["text"]
    assert f"seed 7, says {expected['model']}" in said
    keep(browser, "generation-desk", DESK)
    keep(browser, "generation-phone", PHONE)


def test_it_is_stopped(browser, server):
    opened(browser, server)
    typed(browser, "max_tokens", "4000")
    find(browser, "ask").click()
    find(browser, "stop").click()
    assert until(browser, "stopped") and not find(browser, "stop").is_displayed()


def test_what_is_wrong_is_said(browser, server):
    opened(browser, server)
    browser.execute_script("document.getElementById('max_tokens').removeAttribute('min')")
    typed(browser, "max_tokens", "0")
    find(browser, "ask").click()
    assert until(browser, "max_tokens: input should be greater than or equal to 1")
    assert browser.get_log("browser") != []  # Chromium logs the status 422
