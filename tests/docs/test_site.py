"""The site that `make docs` builds: complete, without a broken link, and with nothing from another host."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browsing import IN_BROWSER, PHONE, keep
from places import ROOT

import lockstep
from lockstep.base import plugins
from lockstep.recipe.recipe import Recipe, kind_of, settings

LESSONS = sorted((ROOT / "docs" / "lessons").glob("[0-9]*.md"))
SECTION = "reference/configuration/{}.html"
"""A section's page of the configuration reference."""
WIDE = (1280, 1000)
LOADING = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload", "manifest"}
"""Kinds of <link> that make a browser ask for something."""
DRAWN = "return [...document.querySelectorAll('div.mermaid')].filter(each => each.clientHeight > 40).length"
LOADED = "return performance.getEntriesByType('resource').map(each => each.name)"


class Read(HTMLParser):
    """What a page loads, where it leads, and what can be led to."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.leads, self.anchors = [], [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        self.loads += [found[key] for key in ("src", "srcset", "poster", "data") if found.get(key)]
        if tag == "link" and LOADING & set(found.get("rel", "").split()):
            self.loads.append(found["href"])
        self.loads += re.findall(r"url\(['\"]?([^)'\"]+)", found.get("style") or "")
        if tag == "a" and found.get("href"):
            self.leads.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {page.relative_to(site).as_posix(): Read(page) for page in site.rglob("*.html")}


def test_nothing_comes_from_another_host(site, pages):
    assert [(name, each) for name, page in pages.items() for each in page.loads if urlsplit(each).netloc] == []
    styles = {sheet.name: sheet.read_text() for sheet in site.rglob("*.css")}
    assert [name for name, text in styles.items() if re.search(r"@import|url\(['\"]?(https?:)?//", text)] == []


def test_lists_are_lists(site):
    """Without an empty line before it, a list is shown as part of the paragraph."""
    texts = {page.name: re.findall(r"<p>(.*?)</p>", page.read_text(), re.DOTALL) for page in site.rglob("*.html")}
    assert [name for name, found in texts.items() for each in found if re.search(r"\n *(- |\d+\. )", each)] == []


def test_links_lead_to_pages_and_places_that_exist(site, pages):
    """Also those that the hooks write, which MkDocs does not check."""
    wrong = []
    for name, page in pages.items():
        if name == "404.html":  # its links are absolute: it may be shown anywhere
            continue
        for link in page.leads:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            file = (site / name).parent / unquote(target.path) if target.path else site / name
            place = pages.get(os.path.relpath(file, site))
            if not file.exists() or (target.fragment and place and unquote(target.fragment) not in place.anchors):
                wrong.append((name, link))
    assert wrong == []


def test_the_reference_is_whole(site, pages):
    plugin_sections = {name: kind_of(name) for name in Recipe.model_fields if kind_of(name)}
    assert set(plugin_sections) == {"data", "model", "parallel", "launch"}
    for name, kind in plugin_sections.items():
        assert {f"{name}-{each}" for each in kind.names()} <= pages[SECTION.format(name)].anchors
    texts = {name: (site / SECTION.format(name)).read_text() for name in Recipe.model_fields}
    assert {name for name in settings() if f"<code>{name}</code>" not in texts[name.partition(".")[0]]} == set()
    assert set(plugins.names("cli")) <= pages["reference/commands.html"].anchors
    named = " ".join(pages["reference/python.html"].anchors)
    offered = [name for name in lockstep.__all__ if not name.startswith("__")]
    assert [name for name in [*offered, "Evaluated"] if f".{name}" not in named] == []


def test_titles_in_the_navigation_are_headings():
    """MkDocs takes the heading of a page without a title there."""
    assert re.findall(r"^ +- (.+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE) == ["Overview"]


def test_the_reference_begins_with_its_sections(pages):
    assert {f"configuration/{name}.html" for name in Recipe.model_fields} <= set(
        pages["reference/configuration.html"].leads
    )
    assert "#train-epochs" in pages[SECTION.format("train")].leads
    assert {"#model-gpt", "#model-gpt-layers"} <= set(pages[SECTION.format("model")].leads)


def test_lessons_and_readme_are_in_it(pages):
    leads = pages["lessons/index.html"].leads
    assert {f"{lesson.stem}.html" for lesson in LESSONS} <= set(leads)
    assert {"bring-your-own-model", "installation"} <= pages["overview.html"].anchors
    assert "../files/lessons/02_processes.py.html" in pages["lessons/02-processes.html"].leads


def test_no_mark_is_left(site):
    assert [page.name for page in site.rglob("*.html") if "<!-- generated:" in page.read_text()] == []


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def in_browser(test):
    return functools.reduce(lambda marked, mark: mark(marked), IN_BROWSER, test)


@in_browser
def test_every_diagram_is_drawn(browser, site, address):
    """One with a mistake stays text, and is an error in the browser's log."""
    from selenium.webdriver.support.ui import WebDriverWait

    expected = {page: page.read_text().count("```mermaid") for page in sorted((ROOT / "docs").rglob("*.md"))}
    for page, count in expected.items():
        if count:
            browser.get(f"{address}{page.relative_to(ROOT / 'docs').with_suffix('.html')}")
            WebDriverWait(browser, 15).until(lambda _, count=count: browser.execute_script(DRAWN) == count, str(page))
            assert [each for each in browser.execute_script(LOADED) if not each.startswith(address)] == []
            assert browser.get_log("browser") == [], page
    assert sum(expected.values()) >= len(LESSONS)


@in_browser
@pytest.mark.parametrize(
    "page",
    [
        *("index", "lessons/02-processes", "reference/configuration", "reference/configuration/train"),
        *(pytest.param(page, marks=pytest.mark.matrix) for page in ("overview", "coming-from")),
    ],
)
def test_pages_fit_a_desk_and_a_phone(browser, address, page):
    browser.set_window_size(*WIDE)
    browser.get(f"{address}{page}.html")
    name = f"site-{page.replace('/', '-')}"
    keep(browser, f"{name}-desk", WIDE)
    keep(browser, f"{name}-phone", PHONE)
    assert [each for each in browser.execute_script(LOADED) if not each.startswith(address)] == []
