"""A strict reader of pages: what is opened is closed, nothing is fetched, no name is markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

VOID = {"meta", "img"}
FETCHES = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Page(HTMLParser):
    """The elements and texts of a page. Raises AssertionError for what is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        assert text.startswith("<!DOCTYPE html>\n<html lang=")
        self.feed(text)
        self.close()
        assert self.open == []
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        assert not [name for name, _ in attrs if name.startswith("on")]
        for name, value in attrs:
            if name in FETCHES:
                beside = tag == "a" and re.fullmatch(r"[\w./%@-]+", value or "")  # a file that lies beside the page
                assert beside or (value or "").startswith(("#", "data:image/svg+xml;base64,")), value
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return [name for name, _ in self.tags].count(tag)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def in_browser(path: Path, tmp_path: Path, *flags: str) -> str:
    """The page's elements once its script has run. Skips where there is no browser; fails on what a console shows."""
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        pytest.skip(f"no headless browser: none of {', '.join(BROWSERS)} is installed")
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--no-first-run",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", *flags, "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r".*:CONSOLE.*", done.stderr) == []
    return done.stdout


def measured(html: str, script: str, tmp_path: Path, width: int) -> Any:
    """What a script returns that sees the page as ``page``, a document in a frame of so many pixels."""
    path = tmp_path / "frame.html"
    path.write_text(
        f"""<!DOCTYPE html><meta charset="utf-8"><script>
        function measure(frame) {{
          const found = document.createElement("pre");
          found.textContent = JSON.stringify((function (page) {{ {script} }})(frame.contentDocument));
          document.body.append(found);
        }}</script><body>
        <iframe width="{width}" height="800" onload="measure(this)" srcdoc="{escape(html)}"></iframe>""",
        encoding="utf-8",
    )
    (found,) = re.findall(r"<pre>(.*?)</pre>", in_browser(path, tmp_path), re.DOTALL)
    return json.loads(unescape(found))
