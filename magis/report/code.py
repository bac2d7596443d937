"""What a kept result depends on besides its case: the code that makes it."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["code_digest"]

DECIDE = ("numpy", "numba", "rustworkx")
"""Packages that take part in a search."""


def code_digest(*further: str) -> str:
    """SHA-256 of this package's sources and of the versions of Python and of what searches call; ``further`` names more
    packages (torch, where an operator's figures count)."""
    found = hashlib.sha256(platform.python_version().encode())
    for name in (*DECIDE, *further):
        found.update(f"{name} {metadata.version(name)}".encode())
    package = Path(__file__).parent.parent
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}".encode() + path.read_bytes())
    return found.hexdigest()
