"""magis: make a PyTorch training step need less device memory at almost no extra time.

The public names live in the modules listed below and are loaded on first use, so that `import magis` costs
nothing: it imports neither torch nor numpy nor any other module of this package. To export one more name, add
a row to `_EXPORTS` (of a neighbour, to `magis.registry`), the name to `__all__` and an import to the
`TYPE_CHECKING` block.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magis.api import Workload, estimate, fit, pareto, peak, run_case
    from magis.errors import BaselineError, CaptureError, MagisError, PartialUpdateError, UsageError, VerifyError
    from magis.extensions.compile.checkpointing.choose import checkpoint_policy
    from magis.extensions.compile.joint_tags import JointTags, tag_joint_graph
    from magis.extensions.compile.trainers import LightningCallback, MagisCallback
    from magis.frontends.optimize import OptimizedStep, optimize
    from magis.report import read_results

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "CaptureError",
    "JointTags",
    "LightningCallback",
    "MagisCallback",
    "MagisError",
    "OptimizedStep",
    "PartialUpdateError",
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

# public name -> the module that defines it; those of neighbours stand in magis.registry
_EXPORTS = {
    "BaselineError": "magis.errors",
    "CaptureError": "magis.errors",
    "MagisError": "magis.errors",
    "OptimizedStep": "magis.frontends.optimize",
    "PartialUpdateError": "magis.errors",
    "UsageError": "magis.errors",
    "VerifyError": "magis.errors",
    "Workload": "magis.api",
    "estimate": "magis.api",
    "fit": "magis.api",
    "optimize": "magis.frontends.optimize",
    "pareto": "magis.api",
    "peak": "magis.api",
    "read_results": "magis.report",
    "run_case": "magis.api",
}

# names of before -> where they are now
_MOVED = {
    "Bench": "magis.api",
    "OptimizerSpec": "magis.api",
    "RegionPolicies": "magis.extensions.compile",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use; AttributeError for any other name."""
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name in __all__:
        exported: object = import_module("magis.registry").load("export", name)
        return exported
    if name in _MOVED:
        text = f"magis.{name} is {_MOVED[name]}.{name} now"
        import_module("warnings").warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
