"""The page around the viewer of steps, and pages of single steps: memory over time, and what is alive at any moment.

`page.html` is the template, `page.js` the viewer. Everything except `Markup` is escaped, so names cannot inject HTML.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from magis import __version__
from magis.plain_records import to_plain
from magis.report import write_text_atomically
from magis.results import TensorLives
from pytest_magis.baselines import torch_version
from pytest_magis.outputs.html.page_parts import embedded, git, text

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: the page loads nothing from outside, even if a name injects HTML."""


@dataclass
class Views:
    """Views of one or two steps each, with every step once in the data of the page."""

    steps: dict[str, int] = field(default_factory=dict)
    views: list[dict[str, Any]] = field(default_factory=list)

    def add(self, steps: Mapping[str, TensorLives], limit: int | None = None) -> int:
        """Add the view of one or two steps by name, with a memory limit in bytes; return its number."""
        plain = (json.dumps(to_plain(lives), separators=(",", ":")) for lives in steps.values())
        numbers = [self.steps.setdefault(each, len(self.steps)) for each in plain]
        self.views.append({"names": list(steps), "steps": numbers, "limit": limit})
        return len(self.views) - 1

    def data(self) -> str:
        return embedded({"steps": [json.loads(each) for each in self.steps], "views": self.views})


def write_page(path: Path, views: Views, **variables: object) -> None:
    """Write a page with the variables of the template. Raises UsageError on failure."""
    resources = {name: (files(__package__) / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_escaped, keep_trailing_newline=True)
    empty = dict.fromkeys(("accept", "ended", "header", "verdicts", "cases", "fronts", "lines"), ())
    page = environment.from_string((files(__package__) / "page.html").read_text(encoding="utf-8")).render(
        empty
        | {
            "policy": POLICY,
            "style": Markup(resources["page.css"]),  # noqa: S704
            "script": Markup(resources["page.js"]),  # noqa: S704
            "data": Markup(views.data()),  # noqa: S704
            "view": None,
            "version": __version__,
        }
        | variables
    )
    write_text_atomically(path, page)


def _escaped(value: object) -> Markup:
    """Escape a value for the template, line breaks and control characters included; `Markup` is unchanged."""
    return value if isinstance(value, Markup) else Markup(text(value))  # noqa: S704


def provenance_of(devices: Sequence[str], command: str, directory: Path) -> list[tuple[str, str]]:
    """Return what a page says of its origin: names and texts, without what is not known."""
    found = {
        "device": ", ".join(dict.fromkeys(devices)),
        "torch": torch_version(),
        "revision": (git(directory, "describe", "--always", "--dirty=, with changes") or "").strip(),
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "command": command,
    }
    return [(name, words) for name, words in found.items() if words]


def write_steps(path: Path, title: str, lines: Sequence[str], steps: Mapping[str, TensorLives], device: str) -> None:
    """Write the page of one or two predicted steps. Raises UsageError on failure."""
    views = Views()
    view = views.add(steps)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    about = provenance_of([device], command, Path())
    write_page(path, views, state=title, lines=lines, view=view, about=about)
