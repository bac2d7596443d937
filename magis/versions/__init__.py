"""Versions of the code under test: revisions of a project, releases of its dependencies; a run of the gate on one."""

from magis.versions.child_process import terminated_in_order
from magis.versions.environments import environment_of, is_requirement
from magis.versions.gate_run import GatedCase, GateRun, in_working_tree, run_gate, told
from magis.versions.revisions import checkout, repository, resolved
from magis.versions.scratch_folders import scratch_folder

__all__ = [
    "GateRun",
    "GatedCase",
    "checkout",
    "environment_of",
    "in_working_tree",
    "is_requirement",
    "repository",
    "resolved",
    "run_gate",
    "scratch_folder",
    "terminated_in_order",
    "told",
]
