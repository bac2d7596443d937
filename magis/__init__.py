"""magis: make a PyTorch training step need less device memory at almost no extra time.

The public names live in the modules listed below and are loaded on first use, so that `import magis` costs
nothing: it imports neither torch nor numpy nor any other module of this package. To export one more name, add
it to `_EXPORTS`, to `__all__` and to the `TYPE_CHECKING` block.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magis.api import Bench, OptimizerSpec, Workload, estimate, fit, pareto, peak, run_case
    from magis.errors import BaselineError, CaptureError, MagisError, UsageError, VerifyError
    from magis.frontends.checkpointing.choose import checkpoint_policy
    from magis.frontends.checkpointing.policy import RegionPolicies
    from magis.frontends.optimize import OptimizedStep, optimize
    from magis.report import read_results

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "Bench",
    "CaptureError",
    "MagisError",
    "OptimizedStep",
    "OptimizerSpec",
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
]

# public names by the module that they are loaded from
_EXPORTS = {
    "magis.api": ("Bench", "OptimizerSpec", "Workload", "estimate", "fit", "pareto", "peak", "run_case"),
    "magis.errors": ("BaselineError", "CaptureError", "MagisError", "UsageError", "VerifyError"),
    "magis.frontends.checkpointing.choose": ("checkpoint_policy",),
    "magis.frontends.checkpointing.policy": ("RegionPolicies",),
    "magis.frontends.optimize": ("OptimizedStep", "optimize"),
    "magis.report": ("read_results",),
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use; AttributeError for any other name."""
    module = next((module for module, names in _EXPORTS.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
