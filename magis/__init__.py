"""magis: make a PyTorch training step need less device memory at almost no extra time.

The public names live in the modules listed below and are loaded on first use, so that `import magis` costs
nothing: it imports neither torch nor numpy nor any other module of this package. To export one more name, add
a row to `_EXPORTS`, the name to `__all__` and an import to the `TYPE_CHECKING` block.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magis.api import Bench, OptimizerSpec, Workload, estimate, fit, pareto, peak, run_case
    from magis.errors import BaselineError, CaptureError, MagisError, PartialUpdateError, UsageError, VerifyError
    from magis.frontends.checkpointing.choose import checkpoint_policy
    from magis.frontends.checkpointing.policy import RegionPolicies
    from magis.frontends.compile.joint_tags import JointTags, tag_joint_graph
    from magis.frontends.optimize import OptimizedStep, optimize
    from magis.frontends.trainers import LightningCallback, MagisCallback
    from magis.report import read_results

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "Bench",
    "CaptureError",
    "JointTags",
    "LightningCallback",
    "MagisCallback",
    "MagisError",
    "OptimizedStep",
    "OptimizerSpec",
    "PartialUpdateError",
    "RegionPolicies",
    "UsageError",
    "VerifyError",
    "Workload",
    "__version__",
    "checkpoint_policy",
    "estimate",
    "fit",
    "optimize",
    "pareto",
    "peak",
    "read_results",
    "run_case",
    "tag_joint_graph",
]

# public name -> the module that defines it
_EXPORTS = {
    "BaselineError": "magis.errors",
    "Bench": "magis.api",
    "CaptureError": "magis.errors",
    "JointTags": "magis.frontends.compile.joint_tags",
    "LightningCallback": "magis.frontends.trainers",
    "MagisCallback": "magis.frontends.trainers",
    "MagisError": "magis.errors",
    "OptimizedStep": "magis.frontends.optimize",
    "OptimizerSpec": "magis.api",
    "PartialUpdateError": "magis.errors",
    "RegionPolicies": "magis.frontends.checkpointing.policy",
    "UsageError": "magis.errors",
    "VerifyError": "magis.errors",
    "Workload": "magis.api",
    "checkpoint_policy": "magis.frontends.checkpointing.choose",
    "estimate": "magis.api",
    "fit": "magis.api",
    "optimize": "magis.frontends.optimize",
    "pareto": "magis.api",
    "peak": "magis.api",
    "read_results": "magis.report",
    "run_case": "magis.api",
    "tag_joint_graph": "magis.frontends.compile.joint_tags",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use; AttributeError for any other name."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
