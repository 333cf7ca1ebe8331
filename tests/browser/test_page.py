"""The page in a real browser: typed into, drawn on, without a mouse, on a phone; pictures of it are kept."""

import json
import re

import numpy as np
import pytest
from browsing import DESK, IN_BROWSER, PHONE, keep
from served import image_export, png, serving, text_export

pytestmark = IN_BROWSER


@pytest.fixture(scope="module")
def texts(tmp_path_factory, minilm):
    with serving(
        text_export(tmp_path_factory.mktemp("text") / "news", minilm), variables={"LOCKSTEP_API_KEY": ""}
    ) as server:
        yield server


def find(browser, name):
    return browser.find_element("id", name)


def until(browser, words):
    """The answer, once it says these."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 15).until(lambda _: re.search(words, find(browser, "answer").text))
    return find(browser, "answer").text


def opened(browser, server):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(server.url + "/")
    WebDriverWait(browser, 15).until(lambda _: "labels" in find(browser, "about").text)


def bars(browser):
    return [row.text.splitlines() for row in browser.find_elements("css selector", "#bars li")]


def test_a_headline_by_keyboard_alone(browser, texts):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    opened(browser, texts)
    headline = "Late goal <b>wins</b> the cup"
    keys = ActionChains(browser)
    keys.send_keys(Keys.TAB).send_keys(headline).send_keys(Keys.ENTER).perform()
    until(browser, r"% sure, in \d+ ms")
    told = texts.post(json={"text": headline}).json()
    assert find(browser, "answer").text.startswith(told["label"])
    shown = bars(browser)
    assert [row[0] for row in shown] == sorted(told["probabilities"], key=lambda label: -told["probabilities"][label])
    assert all(row[-1].endswith("%") for row in shown)
    for number in range(9):
        find(browser, "text").clear()
        find(browser, "text").send_keys(f"Try number {number} " + "with a long text " * 9, Keys.ENTER)
        browser.find_element("xpath", f"//*[@id='recent']//span[contains(., 'Try number {number} ')]")
    recent = browser.find_elements("css selector", "#recent button")
    assert len(recent) == 8
    recent[-1].click()
    assert find(browser, "text").get_attribute("value").startswith("Try number 1 ")
    keep(browser, "text-desk", DESK)
    keep(browser, "text-phone", PHONE)


def test_what_is_wrong_is_said(browser, texts):
    opened(browser, texts)
    find(browser, "ask").click()
    assert until(browser, "Type a text first")
    browser.execute_script("document.getElementById('text').value = 'a'.repeat(9 << 20)")
    find(browser, "ask").click()
    assert until(browser, "a request may have 8,388,608 bytes")
    browser.get_log("browser")  # the browser's own line on the status 413


def test_a_screen_reader_finds_its_way(browser, texts):
    """Every control has a name, the answer is announced, headings are in order."""
    opened(browser, texts)
    for control in browser.find_elements("css selector", "textarea, button, input, canvas"):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")
    assert find(browser, "answer").aria_role == "status"
    assert find(browser, "answer").get_attribute("aria-live") == "polite"
    assert [each.tag_name for each in browser.find_elements("css selector", "h1, h2, h3")] == ["h1", "h2", "h2"]
    assert browser.find_element("tag name", "html").get_attribute("lang") == "en"


def test_a_digit_is_drawn(browser, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains

    with serving(image_export(tmp_path / "digits"), variables={"LOCKSTEP_API_KEY": "open"}) as server:
        browser.get(server.url + "/")
        until_key = "this needs the header"
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(browser, 15).until(lambda _: until_key in find(browser, "about").text)
        find(browser, "key").send_keys("open")
        find(browser, "title").click()
        WebDriverWait(browser, 15).until(lambda _: "10 labels" in find(browser, "about").text)
        find(browser, "ask").click()
        until(browser, "Draw something")
        hand = ActionChains(browser, duration=20).move_to_element_with_offset(find(browser, "canvas"), -50, -70)
        hand.click_and_hold().move_by_offset(90, 0).move_by_offset(-50, 150).release().perform()
        find(browser, "ask").click()
        until(browser, "% sure")
        assert len(bars(browser)) == 10
        keep(browser, "image-phone", PHONE)
        picture = tmp_path / "picture.png"
        picture.write_bytes(png(np.arange(64).reshape(8, 8) * 4))
        find(browser, "file").send_keys(str(picture))
        told = server.post(files={"file": picture.read_bytes()}, headers={"authorization": "Bearer open"}).json()
        browser.find_element("css selector", "#recent li:nth-child(2)")
        assert find(browser, "answer").text.startswith(told["label"])
        keep(browser, "image-desk", DESK)
        browser.get_log("browser")  # the browser's own line on the status 401


def test_a_photo_is_chosen_and_not_drawn(browser, tmp_path):
    facts = image_export(tmp_path / "photos") / "lockstep.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"recipe": {"data": {"kind": "files"}}}))
    picture = tmp_path / "picture.png"
    picture.write_bytes(png(np.arange(64).reshape(8, 8) * 4))
    with serving(facts.parent, variables={"LOCKSTEP_API_KEY": ""}) as server:
        opened(browser, server)
        assert find(browser, "file").accessible_name == "Image" and not find(browser, "canvas").is_displayed()
        find(browser, "ask").click()
        until(browser, "Choose an image first")
        find(browser, "file").send_keys(str(picture))
        until(browser, "% sure")
        assert find(browser, "preview").is_displayed()
        keep(browser, "photo-desk", DESK)
        keep(browser, "photo-phone", PHONE)
        find(browser, "clear").click()
        assert not find(browser, "preview").is_displayed()
