"""The public functions of magis: capture, plan, run and measure; the one place that wires the layers together."""

from magis.api.bench import Bench, available_devices, check_device, default_device
from magis.api.cases import run_case
from magis.api.check import check_case
from magis.api.fronts import pareto
from magis.capture import Captured, OptimizerSpec, Workload, capture

__all__ = [
    "Bench",
    "Captured",
    "OptimizerSpec",
    "Workload",
    "available_devices",
    "capture",
    "check_case",
    "check_device",
    "default_device",
    "pareto",
    "run_case",
]
