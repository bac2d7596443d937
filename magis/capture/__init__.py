"""From a module to a graph."""

from magis.aten.optimizers import OptimizerSpec
from magis.capture.step import Captured, capture
from magis.capture.workload import Workload

__all__ = ["Captured", "OptimizerSpec", "Workload", "capture"]
