"""From a module to a graph."""

from magis.capture.step import Captured, capture

__all__ = ["Captured", "capture"]
