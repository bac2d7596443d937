"""Versions of the code under test: revisions of a project, releases of its dependencies; a run of the gate on one."""

from magis.versions.environments import environment_of, is_requirement, releases
from magis.versions.gate_run import COMPARED_WITH, STRAYS, GateRun, run_gate
from magis.versions.revisions import checkout, moved, repository, resolved

__all__ = [
    "COMPARED_WITH",
    "STRAYS",
    "GateRun",
    "checkout",
    "environment_of",
    "is_requirement",
    "moved",
    "releases",
    "repository",
    "resolved",
    "run_gate",
]
