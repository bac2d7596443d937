"""Registry of neighbours (optional packages) by kind and name, imported on first use.

The core imports no neighbour directly. Another package registers one with an entry point of the group "magis.KIND":

    [project.entry-points."magis.search"]
    mine = "my_package.search:plan"
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

from magis.errors import UsageError

__all__ = ["MissingNeighbourError", "check", "load", "names", "optional", "present"]

_PLACES = {
    "export": {
        "Diagnosis": "magis.extensions.why.diagnosis:Diagnosis",
        "JointTags": "magis.extensions.compile.joint_tags:JointTags",
        "LightningCallback": "magis.extensions.compile.trainers:LightningCallback",
        "MagisCallback": "magis.extensions.compile.trainers:MagisCallback",
        "checkpoint_policy": "magis.extensions.compile.checkpointing.choose:checkpoint_policy",
        "tag_joint_graph": "magis.extensions.compile.joint_tags:tag_joint_graph",
        "why": "magis.extensions.why.diagnosis:why",
    },
    "compiled": {
        "result": "magis.extensions.compile.compiled_step:compiled_result",
        "figures": "magis.extensions.compile.compiled_step:compiled_figures",
        "compiler": "magis.extensions.compile.fused_plan:PlanCompiler",
    },
    "networks": {"magis": "magis.extensions.models.network_names:NETWORKS"},
    "strategy": {
        "ort": "magis.extensions.onnx.ort_cases:ort_result",
        "distributed": "magis.extensions.ranks.rank_cases:ranked_result",
        "planned": "magis.extensions.ranks.planned_rank_cases:planned_on_ranks",
    },
    "ranks": {
        "accumulated": "magis.extensions.ranks.strategies.distributed:Accumulated",
        "halved": "magis.extensions.ranks.strategies.distributed:Halved",
        "replicated": "magis.extensions.ranks.strategies.data_parallel:Replicated",
        "fully sharded": "magis.extensions.ranks.strategies.data_parallel:FullyShard",
        "partitioned": "magis.extensions.ranks.strategies.zero:Zero",
        "model parallel": "magis.extensions.ranks.strategies.model_parallel:ModelParallel",
        "pool": "magis.extensions.ranks.processes.pool:RankPool",
        "attached": "magis.extensions.ranks.processes.rank_hosts:attached",
        "lead": "magis.extensions.ranks.processes.agents:lead",
        "serve": "magis.extensions.ranks.processes.agents:serve",
        "shared step": "magis.extensions.ranks.plans.shared_step:shared_step",
    },
    "command": {
        "bisect": "magis.extensions.versions.bisect_command:add_bisect",
        "rebase": "magis.extensions.versions.rebase_command:add_rebase",
        "why": "magis.extensions.why.why_command:add_why",
    },
    "against": {
        "compare": "pytest_magis.against:compare",
        "guard": "pytest_magis.against:Guard",
    },
    "output": {
        "annotations": "pytest_magis.outputs.github:error_lines",
        "benchmark": "pytest_magis.outputs.benchmark:benchmark_rows",
        "markdown": "pytest_magis.outputs.github:write_summary",
        "page": "pytest_magis.outputs.html.page:write_report",
        "properties": "pytest_magis.outputs.benchmark:readable",
        "steps": "pytest_magis.outputs.html.viewer:write_steps",
    },
    "snapshot": {
        "block": "magis.extensions.snapshots.block_snapshot:save_block",
        "calls": "magis.extensions.snapshots.step_snapshots:save_calls",
        "step": "magis.extensions.snapshots.step_snapshots:save_step",
    },
    "search": {"paper": "magis.extensions.paper.published_plan:published_plan"},
}
"""Table of this project's neighbours: kind -> name -> "module:object"."""


class MissingNeighbourError(UsageError):
    """A required neighbour is not installed."""


def names(kind: str) -> tuple[str, ...]:
    """Return the names of a kind: those of this project first, then entry points of other packages."""
    return tuple(dict.fromkeys((*_PLACES.get(kind, {}), *(point.name for point in _points(kind)))))


def load(kind: str, name: str) -> Any:
    """Import and return an object by kind and name. Raises UsageError for unknown names and missing neighbours."""
    check(kind, name)
    if name not in _PLACES.get(kind, {}):
        return next(point for point in _points(kind) if point.name == name).load()
    module, _, attribute = _PLACES[kind][name].partition(":")
    return getattr(import_module(module), attribute)


def check(kind: str, name: str) -> None:
    """Raise UsageError for an unknown name or a neighbour that is not installed; import nothing."""
    if name not in names(kind):
        raise UsageError(f"no {kind} is called {name!r}", hint=f"known are {', '.join(names(kind)) or 'none'}")
    module, _, _ = _PLACES.get(kind, {}).get(name, "magis").partition(":")
    parents = list(accumulate(module.split("."), "{}.{}".format))
    missing = next((parent for parent in parents if find_spec(parent) is None), None)
    if missing is not None:
        raise MissingNeighbourError(
            f"the {kind} {name!r} needs {missing}, which is not installed", hint="install the whole of pytest-magis"
        )


def optional(kind: str, name: str) -> Any:
    """Import and return an object by kind and name; None if its neighbour is not installed."""
    try:
        return load(kind, name)
    except MissingNeighbourError:
        return None


def present(kind: str) -> Iterator[Any]:
    """Yield all objects of a kind whose neighbours are installed, each imported when it is reached."""
    found = (optional(kind, name) for name in names(kind))
    return (each for each in found if each is not None)


@cache
def _points(kind: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"magis.{kind}"))  # looks through all that is installed
