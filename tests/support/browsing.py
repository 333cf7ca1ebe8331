"""A real browser for tests of pages, and pictures of these for a person to look at."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

IN_BROWSER = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not shutil.which("chromium") or not shutil.which("chromedriver"), reason="no chromium: make test-browser"
    ),
]
PICTURES = Path(__file__).parents[1] / "browser" / "pictures"
PHONE, DESK = (390, 844), (1000, 1100)


@contextmanager
def opened_browser():
    """Fails in the end where a page has logged an error."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_window_size(*DESK)
    driver.implicitly_wait(15)
    try:
        yield driver
        assert driver.get_log("browser") == []
    finally:
        driver.quit()


def keep(browser, name, size):
    """A picture for a person to look at; the page must fit its width."""
    browser.set_window_size(*size)
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    PICTURES.mkdir(exist_ok=True)
    assert browser.save_screenshot(str(PICTURES / f"{name}.png"))
