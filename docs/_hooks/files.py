"""MkDocs hook: pages for README.md and for files of the repository that pages link to, and a navigation with patterns.

A link such as ../lessons/02_processes.py works on a git forge. On the site it leads to a page that shows that file, so
the site needs no address of a forge and is complete without a network.
"""

import fnmatch
import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".slurm": "bash", ".sh": "bash", ".toml": "toml"}
PLACES = {"README.md": "overview.md"}
"""File of the repository -> its page, where that is not SOURCES/FILE.md."""
SOURCES = "files"
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace patterns in the navigation, such as lessons/[0-9]*.md, by the pages that match them."""
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    config.nav = _expanded(config.nav, pages)
    return config


def _expanded(entries: Any, pages: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            found += fnmatch.filter(pages, entry)
        elif isinstance(entry, dict):
            found.append({key: _expanded(v, pages) if isinstance(v, list) else v for key, v in entry.items()})
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for README.md, and one for each file outside of docs/ that a page links to."""
    folder = Path(config.docs_dir)
    waiting = ["README.md"]
    waiting += [path for file in files.documentation_pages() for path in outer_files(file.content_string, file, folder)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(place(path)) is not None:
            continue
        level = InclusionLevel.INCLUDED if path in PLACES else InclusionLevel.NOT_IN_NAV
        page = File.generated(config, place(path), content=content(folder.parent, path), inclusion=level)
        files.append(page)
        waiting += outer_files(page.content_string, page, folder)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Lead links to files outside of docs/ to their pages."""
    folder = Path(config.docs_dir)

    def rewritten(link: re.Match[str]) -> str:
        path = outer_file(link[1], page.file, folder)
        if path is None:
            return link[0]
        return f"]({posixpath.relpath(place(path), posixpath.dirname(page.file.src_uri) or '.')}{link[2] or ''})"

    return LINK.sub(rewritten, markdown)


def place(path: str) -> str:
    """The page of a file of the repository."""
    return PLACES.get(path, f"{SOURCES}/{path}" if path.endswith(".md") else f"{SOURCES}/{path}.md")


def outer_files(markdown: str, file: File, folder: Path) -> Iterator[str]:
    """The files outside of docs/ that a page links to."""
    for target, _ in LINK.findall(markdown):
        path = outer_file(target, file, folder)
        if path is not None:
            yield path


def outer_file(target: str, file: File, folder: Path) -> str | None:
    """A link's file, relative to the repository, if it is outside of docs/ and exists."""
    path = os.path.normpath(folder / posixpath.dirname(file.src_uri) / target)
    is_outer = not Path(path).is_relative_to(folder) and Path(path).is_relative_to(folder.parent)
    return Path(path).relative_to(folder.parent).as_posix() if is_outer and Path(path).exists() else None


def content(root: Path, path: str) -> str:
    """The page of a file or folder; Markdown stays itself, with links that count from where the page is."""
    if path.endswith(".md"):
        text = (root / path).read_text(encoding="utf-8")
        return ("" if path in PLACES else HIDDEN) + LINK.sub(lambda link: moved(link, path), text)
    if path.endswith(".ipynb"):
        return HIDDEN + LINK.sub(lambda link: moved(link, path), notebook((root / path).read_text(encoding="utf-8")))
    shown = sorted(p for p in (root / path).rglob("*") if p.is_file()) if (root / path).is_dir() else [root / path]
    blocks = [block(file, file.relative_to(root).as_posix()) for file in shown]
    return f"{HIDDEN}# {path}\n\nA {'folder' if len(shown) > 1 else 'file'} of the repository.\n\n" + "\n".join(blocks)


def moved(link: re.Match[str], path: str) -> str:
    """A link of a Markdown file of the repository, as written in that file's page."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
    inner = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
    return f"]({posixpath.relpath(inner, posixpath.dirname(place(path)) or '.')}{link[2] or ''})"


def notebook(text: str) -> str:
    """The cells of a Jupyter notebook, without outputs."""
    cells = [(cell["cell_type"] == "code", "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"`````python\n{source}\n`````" if is_code else source for is_code, source in cells)


def block(file: Path, title: str) -> str:
    """A file's text as a block of code; the fence is longer than any in it."""
    language = LANGUAGES.get(file.suffix, "text")
    return f'`````{language} title="{title}"\n{file.read_text(encoding="utf-8")}\n`````\n'
