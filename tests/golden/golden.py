"""Texts that must not change unnoticed, one readable file each beside this one.

A test that produces another text fails with the difference. Where the new text is right, write it down and look at what
git says:

    MAGIS_UPDATE_GOLDEN=1 pytest tests/rewrite tests/backend tests/capture
    git diff tests/golden
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from magis.graph import Graph, dump

HERE = Path(__file__).resolve().parent
SWITCH = "MAGIS_UPDATE_GOLDEN"


def check_golden(name: str, text: str) -> None:
    """Compare a text with the golden file ``name``, or write that file if asked to."""
    path = HERE / name
    if os.environ.get(SWITCH):
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != known:
        lines = difflib.unified_diff(known.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="", n=1)
        pytest.fail("\n".join([*lines, f"if the new text is right: {SWITCH}=1 pytest ..."]), pytrace=False)


def before_and_after(before: Graph, after: Graph) -> str:
    """A rewrite as one text."""
    return f"# before\n{dump(before)}\n# after\n{dump(after)}"
