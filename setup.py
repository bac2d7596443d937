"""Gives the package index a README whose links lead somewhere; everything else is declared in pyproject.toml."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!\[[^\]]*)?\]\((?![a-z]+:|#)([^)]+)\)")


def absolute(text: str, repository: str) -> str:
    """Return Markdown with addresses in the repository in place of relative links: of pages, and of raw pictures."""
    return LINK.sub(
        lambda found: f"{found[1] or ''}]({repository}/{'raw' if found[1] else 'blob'}/HEAD/{found[2]})", text
    )


if __name__ == "__main__":
    urls = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    setup(
        long_description=absolute((HERE / "README.md").read_text(encoding="utf-8"), urls["Repository"]),
        long_description_content_type="text/markdown",
    )
