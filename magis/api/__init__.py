"""The public functions of magis: capture, plan, run and measure; the one place that wires the layers together."""

from magis.api.bench import Bench, available_devices, check_device, check_profile, default_device
from magis.api.cases import run_case
from magis.api.check import check_case
from magis.api.fitting import Fit, FitPoint, fit
from magis.api.fronts import pareto
from magis.api.pricing import FOLDER as PROFILES
from magis.api.pricing import Profiles, profile_file
from magis.api.profiling import record_profile
from magis.capture import Captured, OptimizerSpec, Workload, capture

__all__ = [
    "PROFILES",
    "Bench",
    "Captured",
    "Fit",
    "FitPoint",
    "OptimizerSpec",
    "Profiles",
    "Workload",
    "available_devices",
    "capture",
    "check_case",
    "check_device",
    "check_profile",
    "default_device",
    "fit",
    "pareto",
    "profile_file",
    "record_profile",
    "run_case",
]
