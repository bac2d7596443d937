"""From a module to a graph."""

from magis.capture.step import Captured, capture
from magis.capture.workload import OptimizerSpec, Workload

__all__ = ["Captured", "OptimizerSpec", "Workload", "capture"]
