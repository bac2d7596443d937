"""What programs that write a page of docs/ from the code share: they write it, or check that it is up to date."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_or_check(name: str, page: Callable[[], str], description: str | None) -> int:
    """Write `page()` to docs/`name` or, with --check, only compare them; the exit code, 1 where they differ."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    path, text = DOCS / name, page()
    if parser.parse_args().check:
        return int(not path.is_file() or path.read_text(encoding="utf-8") != text)
    path.write_text(text, encoding="utf-8")
    return 0
