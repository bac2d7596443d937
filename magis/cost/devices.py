"""Device constants of the cost model: peaks from datasheets, and the fractions of a peak that kernels reach.

Peaks are the vendors' dense figures, without sparsity:

* RTX 3090: NVIDIA Ampere GA102 white paper, table 9 (82 SMs; tf32 35.6, fp16/bf16 with fp32 accumulation 71
  TFLOP/s; 936 GB/s; 24 GB).
* V100 SXM2 32 GB: NVIDIA Tesla V100 datasheet (80 SMs; fp32 15.7, fp16 125 TFLOP/s; 900 GB/s). No tf32, no
  bf16: the latter runs at the fp32 rate.
* A100 SXM 80 GB: NVIDIA A100 datasheet (108 SMs; tf32 156, bf16 312 TFLOP/s; 2039 GB/s).
* H100 SXM: NVIDIA H100 datasheet (132 SMs; tf32 494.7, bf16 989.4 TFLOP/s; 3.35 TB/s).
* H200 SXM: NVIDIA H200 datasheet (as the H100; 4.8 TB/s; 141 GB).

Compute capabilities are those of NVIDIA's table, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus, and
/cuda-legacy-gpus for the V100).

float32 matrix products run in tf32 if the device has it, as in the paper. The fractions of these peaks are fitted to
published training speeds (`benchmarks/calibrate.py`; docs/notes/calibration.md gives the errors). Matrix products reach
half of the peak at half a wave of tiles: the median of the square products of 1024 and 2048 in
`benchmarks/calibration/products.csv`. PCIe: 12 GB/s for generation 3, 25 for 4, 50 for 5, about 0.8 of the link's
nominal rate, in both directions at once; a copy has a fixed cost of 10 us. A kernel launch costs 5 us in a step that
PyTorch runs eagerly.

"cpu" is a class of machines, 2-core servers with AVX-512 (fitted by `benchmarks/calibrate_cpu.py`). The constants are
frozen: a search never depends on timings of the machine that it runs on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from magis.cost.cards import card_bytes
from magis.errors import UsageError
from magis.units import GIB, MIB

if TYPE_CHECKING:
    from magis.cost.flops import OperatorWork

CONSTANTS_VERSION = 3
"""Version of the constants and formulas, stored in simulated baselines: increase it whenever one changes a cost."""


class UnknownDevice(UsageError):  # noqa: N818 (the name that users meet)
    """No device has this name; the message lists the names."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Fractions of peak arithmetic and memory bandwidth that one kind of operator reaches."""

    arithmetic: float
    bandwidth: float
    overhead_ns: int = 0
    """Host time per call in ns, in addition to the device's `launch_ns`."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Constants of a device; rates are per second, sizes in bytes, overheads in ns."""

    name: str
    matrix_flops: Mapping[str, float]
    """Peak of matrix products by dtype; other dtypes run at `vector_flops`."""
    vector_flops: float
    bandwidth: float
    memory_bytes: int
    """Memory as the driver reports it."""
    launch_ns: int
    view_ns: int
    rates: Mapping[str, Rates]
    """Rates by kind of operator (`OpInfo.kind`); "unknown" is the default. "matmul.float16" is for that dtype,
    "batch_norm.channels_last" for that memory format, "layout" for converting images around a convolution."""
    rounding: int
    link_bytes_per_s: float
    """Bandwidth of the host link in one direction; 0: no swaps on this device."""
    copy_ns: int
    """Fixed time of a host copy in ns: launch, and latency until the first byte."""
    overlaps: bool
    """True if an operator's arithmetic and memory traffic overlap (max), else their times add up."""
    half_outputs: int = 0
    """Output elements of a matrix product (or convolution, attention) that reach half of the peak."""
    half_bytes: int = 0
    """Bytes moved that reach half of the bandwidth."""
    half_dimension: int = 0
    """Smallest dimension of a matrix product that reaches half of the peak."""
    half_channels: int = 0
    """Channels of a convolution (`OperatorWork.smallest_channels`) that reach half of the peak."""
    lays_out: frozenset[str] = frozenset()
    """Data types whose images are converted to channels_last, and back, around a convolution."""
    element_ns: Mapping[str, float] = field(default_factory=dict)
    """Time per element in ns by operator name, else by kind, in place of counted arithmetic."""
    fault_ns_per_byte: float = 0.0
    """Time per byte in ns of page faults on new memory, for storages of at least `fault_bytes`."""
    fault_bytes: int = 0
    capability: tuple[int, int] | None = None
    """Compute capability of a simulated GPU, which decides on the kernels of attention; None: of no GPU, or of the one
    that is here."""
    loops_lists: bool = False
    """True if a foreach operator launches once per tensor instead of once for many."""

    def rates_of(self, done: OperatorWork) -> Rates:
        """Return the most specific rates of an operator: by dtype, by memory format, else by kind."""
        names = (f"{done.kind}.{done.dtype}", f"{done.kind}.channels_last" if done.channels_last else "", done.kind)
        return next((self.rates[name] for name in names if name in self.rates), self.rates["unknown"])


@dataclass(frozen=True, slots=True)
class Fitted:
    """Fractions of a GPU's peaks, fitted by `benchmarks/calibrate.py` to published measurements."""

    matmul: float
    """Fraction of the peak of float32 matrix products (tf32 if the device has it)."""
    matmul_half: float
    conv: float
    conv_half: float
    bandwidth: float
    """Fraction for an operator that reads and writes each element once; other kinds are proportional."""
    layout: float
    """Fraction of the bandwidth for converting an image's memory format around a convolution."""


_KINDS = {
    # fraction of peak arithmetic, bandwidth relative to a plain copy, additional time per call
    "pointwise": Rates(0.50, 1.0),
    "transcendental": Rates(0.50, 1.0),
    "random": Rates(0.50, 0.91),
    "copy": Rates(0.50, 1.0),
    "strided_copy": Rates(0.50, 0.57),
    "permuted_copy": Rates(0.50, 0.85),
    "fill": Rates(0.50, 1.02),
    "reduction": Rates(0.50, 0.91),
    "softmax": Rates(0.50, 0.85),
    "norm": Rates(0.50, 0.80),
    "batch_norm": Rates(0.50, 0.9),
    # kernels keep part of the image in cache, and read once where `work` counts two reads
    "batch_norm.channels_last": Rates(0.50, 1.45),
    "pool": Rates(0.25, 0.80),
    "resize": Rates(0.25, 0.80),
    "gather": Rates(0.50, 0.68),
    "scatter": Rates(0.25, 0.34, 10_000),  # the kernel sorts its indices first
    "unknown": Rates(0.25, 0.68),
}


def gpu_rates(fitted: Fitted) -> dict[str, Rates]:
    """Return a GPU's rates by kind; the backward of convolution or attention runs two kernels."""
    products = 0.96 * fitted.bandwidth
    rates = {kind: replace(each, bandwidth=each.bandwidth * fitted.bandwidth) for kind, each in _KINDS.items()}
    for suffix, matmul, conv in (
        ("", fitted.matmul, fitted.conv),
        (".float16", fitted.matmul_half, fitted.conv_half),
        (".bfloat16", fitted.matmul_half, fitted.conv_half),
    ):
        rates[f"matmul{suffix}"] = Rates(matmul, products)
        rates[f"conv{suffix}"] = Rates(conv, 0.91 * fitted.bandwidth)
        rates[f"conv_backward{suffix}"] = Rates(0.92 * conv, 0.91 * fitted.bandwidth, _LAUNCH_NS)
        rates[f"attention{suffix}"] = Rates(0.67 * matmul, products)
        rates[f"attention_backward{suffix}"] = Rates(0.53 * matmul, products, _LAUNCH_NS)
    rates["layout"] = Rates(1.0, fitted.layout)
    return rates


_LAUNCH_NS = 5_000
_HALF = frozenset({"float16", "bfloat16"})


def _gpu(
    name: str,
    *,
    multiprocessors: int,
    tera: Mapping[str, float],
    vector_tera: float,
    bandwidth: float,
    link_bytes_per_s: float,
    capability: tuple[int, int],
    lays_out: frozenset[str] = _HALF | {"float32"},
) -> DeviceModel:
    """Build a GPU's constants from its datasheet; `tera` has TFLOP/s of matrix products by dtype.

    Utilization falls with the operator's size: half of the matrix peak at half a wave of 128 x 128 tiles, half of the
    bandwidth at 1024 float32 elements per multiprocessor, read twice and written once.
    """
    return DeviceModel(
        name=name,
        matrix_flops={dtype: value * 1e12 for dtype, value in tera.items()},
        vector_flops=vector_tera * 1e12,
        bandwidth=bandwidth,
        memory_bytes=card_bytes(name),
        launch_ns=_LAUNCH_NS,
        view_ns=0,
        rates=gpu_rates(FITTED[name]),
        rounding=512,
        link_bytes_per_s=link_bytes_per_s,
        copy_ns=10_000,
        overlaps=True,
        half_outputs=multiprocessors * 128 * 128 // 2,
        half_bytes=multiprocessors * 1024 * 12,
        half_channels=16,
        lays_out=lays_out,
        capability=capability,
    )


FITTED = {
    "rtx3090": Fitted(0.92, 1.06, 1.03, 1.03, 0.73, 0.63),
    "v100": Fitted(0.95, 0.77, 1.25, 0.84, 0.66, 0.62),
    "a100": Fitted(0.70, 0.71, 0.58, 0.48, 0.65, 0.59),
    "h100": Fitted(0.81, 0.80, 0.71, 0.59, 0.60, 0.59),
    "h200": Fitted(0.81, 0.80, 0.71, 0.59, 0.53, 0.59),
}
"""Fitted fractions by device. Values above 1: clocks above the datasheet's, and Winograd convolutions."""

_H100 = _gpu(
    "h100", multiprocessors=132, tera={"float64": 66.9, "float32": 494.7, "float16": 989.4, "bfloat16": 989.4},
    vector_tera=66.9, bandwidth=3350e9, link_bytes_per_s=50e9, capability=(9, 0),
)  # fmt: skip
_A100 = _gpu(
    "a100", multiprocessors=108, tera={"float64": 19.5, "float32": 156.0, "float16": 312.0, "bfloat16": 312.0},
    vector_tera=19.5, bandwidth=2039e9, link_bytes_per_s=25e9, capability=(8, 0),
)  # fmt: skip
_GPUS = (
    _gpu(
        "rtx3090", multiprocessors=82, tera={"float64": 0.556, "float32": 35.6, "float16": 71.0, "bfloat16": 71.0},
        vector_tera=35.6, bandwidth=936e9, link_bytes_per_s=25e9, capability=(8, 6),
    ),
    _gpu(
        "v100", multiprocessors=80, tera={"float64": 7.8, "float32": 15.7, "float16": 125.0, "bfloat16": 15.7},
        vector_tera=15.7, bandwidth=900e9, link_bytes_per_s=12e9, capability=(7, 0),
        lays_out=frozenset({"float16"}),
    ),
    _A100,
    _H100,
    replace(_H100, name="h200", bandwidth=4800e9, memory_bytes=card_bytes("h200"), rates=gpu_rates(FITTED["h200"])),
)  # fmt: skip

_CPU_FLOPS = 400e9  # 2 cores x 64 flop a cycle (two AVX-512 fused multiply-adds) x 3.1 GHz
_CPU_BANDWIDTH = 80e9  # a mix of last-level cache and memory, as in a step of a few hundred MB

CPU = DeviceModel(
    name="cpu",
    matrix_flops={"float32": _CPU_FLOPS, "float64": _CPU_FLOPS / 2, "bfloat16": _CPU_FLOPS},
    vector_flops=_CPU_FLOPS / 2,
    bandwidth=_CPU_BANDWIDTH,
    memory_bytes=8 * GIB,
    launch_ns=2_000,
    view_ns=1_500,
    rates={
        "matmul": Rates(0.48, 0.9, 3_000),
        # blocked layouts: inputs and outputs are reordered around the product, at a third of the bandwidth
        "conv": Rates(0.95, 0.31, 80_000),
        "conv_backward": Rates(0.82, 0.31, 160_000),
        "attention": Rates(0.48, 0.9, 200_000),
        "attention_backward": Rates(0.48, 0.9, 200_000),
        "fill": Rates(0.5, 0.5),
        "unknown": Rates(0.5, 0.9),
    },
    rounding=1,
    link_bytes_per_s=0.0,
    copy_ns=0,
    overlaps=False,
    half_dimension=24,
    element_ns={
        # nanoseconds per element on both cores, beyond the memory traffic
        "gelu": 0.16, "gelu_backward": 0.20, "exp": 0.34, "tanh": 1.18, "sigmoid": 0.09, "sqrt": 0.14,
        "silu": 0.10, "silu_backward": 0.12, "pow": 0.90, "transcendental": 0.52,
        "lt": 0.15, "le": 0.15, "gt": 0.15, "ge": 0.15, "eq": 0.15, "ne": 0.15, "where": 2.0, "masked_fill": 2.0,
        "_fused_adamw": 0.02, "_fused_adam": 0.02, "_fused_sgd": 0.01,
        "softmax": 0.20, "_softmax_backward_data": 0.05, "_log_softmax_backward_data": 0.08,
        "norm": 0.10, "native_layer_norm_backward": 0.18,
        "batch_norm": 0.66, "native_batch_norm_backward": 0.15,
        "pool": 2.6, "max_pool2d_with_indices_backward": 0.35, "avg_pool2d": 1.1, "avg_pool2d_backward": 1.1,
        "resize": 0.30, "upsample_nearest2d_backward": 0.35, "upsample_bilinear2d": 0.70,
        "upsample_bilinear2d_backward": 2.0,
        "reduction": 0.05, "var": 2.8, "var_mean": 2.8, "std": 2.8, "std_mean": 2.8,
        "random": 6.0, "strided_copy": 0.48, "permuted_copy": 0.15, "_to_copy": 0.05, "scatter": 0.10,
        "attention": 0.6, "attention_backward": 1.2,
    },
    fault_ns_per_byte=0.33,
    fault_bytes=32 * MIB,  # glibc calls mmap for larger blocks each time: the maximum of its dynamic threshold
    loops_lists=True,
)  # fmt: skip

_DEVICES = {"cpu": CPU, **{f"sim:{gpu.name}": replace(gpu, name=f"sim:{gpu.name}") for gpu in _GPUS}}


def device_names() -> tuple[str, ...]:
    """Return the names that `find_device` accepts without a GPU: "cpu" and "sim:<name>"."""
    return tuple(_DEVICES)


def gpu_name(gpu: str) -> str:
    """Return the short name of a GPU ("NVIDIA H200" -> "h200"); empty if there are no constants for it."""
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    if {"ti", "super"} & set(words):
        return ""
    return next((known.name for known in _GPUS if known.name.removeprefix("rtx") in words), "")


def find_device(name: str, gpu: str = "") -> DeviceModel:
    """Return the constants of "cpu", of "sim:<name>", or of "cuda" with torch's name of the GPU ("NVIDIA H200").

    A GPU without constants gets those of an A100. Raises UnknownDevice, which lists the names.
    """
    if name == "cuda":
        known = gpu_name(gpu)
        found = next((each for each in _GPUS if each.name == known), _A100)
        return replace(found, name="cuda", capability=None)
    if name not in _DEVICES:
        raise UnknownDevice(f"unknown device {name!r}", hint=f"choose one of cuda, {', '.join(_DEVICES)}")
    return _DEVICES[name]
