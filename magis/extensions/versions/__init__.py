"""Versions of the code under test (git revisions, releases of dependencies), and runs of the gate on them."""

from magis.extensions.versions.environments import environment_of, is_requirement
from magis.extensions.versions.gate_run import GatedCase, GateRun, run_gate, without_flag
from magis.extensions.versions.revisions import checkout, repository, resolved
from magis.extensions.versions.scratch_folders import scratch_folder

__all__ = [
    "GateRun",
    "GatedCase",
    "checkout",
    "environment_of",
    "is_requirement",
    "repository",
    "resolved",
    "run_gate",
    "scratch_folder",
    "without_flag",
]
