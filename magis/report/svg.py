"""What pictures are drawn with: one look for all of them, no dependency."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

GRID, TEXT = "#cccccc", "#333333"


def framed(size: tuple[int, int], elements: Iterator[str]) -> Iterator[str]:
    """The lines of a picture of ``size`` (width, height) in pixels, on white."""
    width, height = size
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    yield from elements
    yield "</svg>"


def label(where: tuple[float, float], words: str, anchor: str = "start", colour: str = TEXT) -> str:
    """A line of text; ``anchor`` says which end of it is at ``where``."""
    return (
        f'<text x="{where[0]:.1f}" y="{where[1]:.1f}" font-family="sans-serif" font-size="12" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def across(left: float, right: float, y: float, colour: str = GRID, dashes: str = "") -> str:
    """A horizontal line."""
    pattern = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{colour}"{pattern}/>'
