"""magis: make a PyTorch training step need less device memory at almost no extra time.

Public names are imported on first use (PEP 562), so that `import magis` loads neither torch nor numpy nor another
module of the package. To export a name, add it to `__all__`, to the `TYPE_CHECKING` block and to `_EXPORTS` (a name of
a neighbour: to `magis.registry`).
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
    from magis.extensions.why.diagnosis import Diagnosis, why
    from magis.frontends.optimize import OptimizedStep, optimize
    from magis.phases import phase
    from magis.report import read_results

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "CaptureError",
    "Diagnosis",
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
    "phase",
    "read_results",
    "run_case",
    "tag_joint_graph",
    "why",
]

# public name -> module that defines it; names of neighbours are in magis.registry
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
    "phase": "magis.phases",
    "read_results": "magis.report",
    "run_case": "magis.api",
}

# old public name -> module that defines it now
_MOVED = {
    "Bench": "magis.api",
    "OptimizerSpec": "magis.api",
    "RegionPolicies": "magis.extensions.compile",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use; raise AttributeError for any other name."""
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
    """List the public names, imported or not."""
    return sorted(__all__)
