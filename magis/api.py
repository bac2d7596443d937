"""The public functions of magis: capture, plan, run and measure a step."""

from magis.capture import Captured, OptimizerSpec, Workload, capture
from magis.cases.check import check_case
from magis.cases.run_case import run_case
from magis.frontends.block_peak import BlockPeak, peak
from magis.frontends.estimating import Estimate, Remedy, estimate
from magis.frontends.fitting import Fit, FitPoint, fit
from magis.frontends.profiling import record_profile
from magis.frontends.step_function import BatchPeak, step_case
from magis.planner.bench import Bench, available_devices, check_device, check_profile, default_device
from magis.planner.device_profiles import FOLDER as PROFILES
from magis.planner.device_profiles import Profiles, profile_file
from magis.planner.fronts import pareto

__all__ = [
    "PROFILES",
    "BatchPeak",
    "Bench",
    "BlockPeak",
    "Captured",
    "Estimate",
    "Fit",
    "FitPoint",
    "OptimizerSpec",
    "Profiles",
    "Remedy",
    "Workload",
    "available_devices",
    "capture",
    "check_case",
    "check_device",
    "check_profile",
    "default_device",
    "estimate",
    "fit",
    "pareto",
    "peak",
    "profile_file",
    "record_profile",
    "run_case",
    "step_case",
]
