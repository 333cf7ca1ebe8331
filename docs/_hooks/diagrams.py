"""MkDocs hook: serves mermaid from the site itself, to pages with a diagram only.

The file is the one that mermaid publishes on npm (MIT license); it comes from the Python package mermaidx, so that a
build needs no network. Where a page has loaded it, mkdocs-material's own script does not ask a foreign host for it.
"""

import hashlib
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from lockstep.base import plugins

SCRIPT = "assets/javascripts/mermaid.min.js"
SETTINGS = "assets/diagrams.js"
SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""Of dist/mermaid.min.js in mermaid 11.16.0 on npm."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the script to the site."""
    script = (plugins.package_folder("mermaidx") / "assets" / "mermaid.js").read_bytes()
    if hashlib.sha256(script).hexdigest() != SHA256:
        raise PluginError("mermaidx does not contain mermaid 11.16.0: install the version in constraints.txt")
    files.append(File.generated(config, SCRIPT, content=script))
    return files


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Load it, and our settings of it, at the end of a page with a diagram."""
    if '<pre class="mermaid">' not in html:
        return html
    urls = [get_relative_url(script, page.url) for script in (SCRIPT, SETTINGS)]
    return "\n".join([html, *(f'<script src="{url}"></script>' for url in urls)])
