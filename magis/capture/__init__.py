"""Capture of a module's training step as a graph."""

from magis.capture.captured import Captured, capture
from magis.capture.workload import Workload
from magis.ops.optimizers import OptimizerSpec

__all__ = ["Captured", "OptimizerSpec", "Workload", "capture"]
