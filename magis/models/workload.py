"""What a model hands to the rest of magis; defined with the capture that takes it, named here for its makers."""

from __future__ import annotations

from magis.capture.workload import OPTIMIZER_KINDS, OptimizerSpec, Workload

__all__ = ["OPTIMIZER_KINDS", "OptimizerSpec", "Workload"]
