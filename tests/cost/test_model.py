"""Times and workspaces: whole numbers, profile first, splitting never pays, datasheets never exceeded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.cards import CARDS, CONTEXT_BYTES, card_bytes, limit_bytes
from magis.cost.cost_model import RooflineCosts, device_model
from magis.cost.devices import FITTED, DeviceModel, device_names, find_device
from magis.cost.flops import work
from magis.cost.machines import machines
from magis.cost.operator_latency import ESTIMATED, MEASURED, Price, roofline_ns
from magis.cost.profile_store import Entry, Profile
from magis.cost.signature import signature
from magis.errors import UsageError
from magis.graph.nodes import Arg, Op, Ref, Value

DEVICES = [find_device(name) for name in device_names()]
GPUS = [device for device in DEVICES if device.name != "cpu"]
by_name = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
gpus = pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)


def dense(number: int, *shape: int, dtype: str = "float32") -> Value:
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return Value(number, shape, tuple(stride), dtype, number)


def product(m: int, k: int, n: int, dtype: str = "float32") -> tuple[Op, dict[int, Value]]:
    shapes = ((m, k), (k, n), (m, n))
    values = {number: dense(number, *shape, dtype=dtype) for number, shape in enumerate(shapes)}
    return Op(0, "aten.mm.default", (Ref(0), Ref(1)), (), (2,)), values


def pointwise(size: int, target: str = "aten.add.Tensor") -> tuple[Op, dict[int, Value]]:
    values = {number: dense(number, size) for number in range(3)}
    return Op(0, target, (Ref(0), Ref(1)), (), (2,)), values


sizes = st.integers(1, 4096)


@by_name
@given(sizes, sizes, sizes)
def test_nothing_is_faster_than_the_datasheet(device: DeviceModel, m: int, k: int, n: int) -> None:
    op, values = product(m, k, n)
    spent = roofline_ns(device, op, values)
    assert isinstance(spent, int)
    assert spent >= device.launch_ns
    assert 2 * m * k * n / spent <= device.matrix_flops["float32"] / 1e9
    assert work(op, values).moved_bytes / spent <= device.bandwidth / 1e9


@by_name
@given(st.integers(1, 1 << 22), st.integers(2, 16))
def test_splitting_costs_more_than_it_saves(device: DeviceModel, part: int, parts: int) -> None:
    whole = roofline_ns(device, *pointwise(part * parts))
    apart = parts * roofline_ns(device, *pointwise(part))
    # storages beyond the size that the C library keeps cost more by themselves: splitting avoids that
    limit = device.fault_bytes // 4 if device.fault_bytes else 1 << 40
    if part * parts < limit:
        assert apart >= whole + (parts - 1) * device.launch_ns - parts


@by_name
def test_larger_is_never_faster(device: DeviceModel) -> None:
    for make in (lambda size: product(size, 64, 64), pointwise):
        times = [roofline_ns(device, *make(size)) for size in (1, 16, 64, 256, 1024, 4096, 65536)]
        assert times == sorted(times)


@gpus
def test_big_operators_reach_the_fitted_shares(device: DeviceModel) -> None:
    fitted = FITTED[device.name.removeprefix("sim:")]
    for dtype, share in (("float32", fitted.matmul), ("float16", fitted.matmul_half)):
        reached = 2 * 8192**3 / roofline_ns(device, *product(8192, 8192, 8192, dtype)) * 1e9
        assert reached / device.matrix_flops[dtype] == pytest.approx(share, rel=0.02)
    op, values = pointwise(1 << 28)
    reached = work(op, values).moved_bytes / roofline_ns(device, op, values) * 1e9
    assert reached / device.bandwidth == pytest.approx(fitted.bandwidth, rel=0.02)


@pytest.mark.parametrize(
    ("name", "memory_gib", "link"),
    [("rtx3090", 24, 25e9), ("v100", 32, 12e9), ("a100", 80, 25e9), ("h100", 80, 50e9), ("h200", 140, 50e9)],
)
def test_devices_by_name(name: str, memory_gib: int, link: float) -> None:
    costs: RooflineCosts = device_model(f"sim:{name}")
    assert costs.name == f"sim:{name}"
    assert costs.memory_bytes == card_bytes(name)
    assert 0.98 * memory_gib * 2**30 < card_bytes(name) < memory_gib * 2**30
    assert costs.rounding == 512
    assert costs.link_bytes_per_s == link
    assert costs.transfer_ns(0) == costs.copy_ns == 10_000
    assert costs.transfer_ns(10**9) == 10_000 + round(1e18 / link)


def test_a_limit_is_an_amount_or_a_card() -> None:
    assert limit_bytes(5) == 5
    assert limit_bytes("24 GiB") == 24 * 2**30
    assert limit_bytes("RTX4090") == card_bytes("rtx4090") - CONTEXT_BYTES < 24 * 2**30
    with pytest.raises(UsageError, match=r"not an amount of memory: 'rtx9'.*, or a card: t4, "):
        limit_bytes("rtx9")


def test_the_page_has_the_memory_of_every_card(repository: Path) -> None:
    page = (repository / "docs" / "notes" / "cards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| ([0-9.]+) \|", page, re.MULTILINE)
    assert {name: int(float(gib) * 1024) * 2**20 for name, gib in rows} == {name: card_bytes(name) for name in CARDS}


@pytest.mark.parametrize(
    ("gpu", "like"), [("NVIDIA GeForce RTX 3090", "rtx3090"), ("NVIDIA H200", "h200"), ("Unheard Of", "a100")]
)
def test_real_gpus_take_the_constants_of_their_kind_and_swap_nothing(gpu: str, like: str) -> None:
    found, simulated = find_device("cuda", gpu), find_device(f"sim:{like}")
    assert (found.name, found.link_bytes_per_s) == ("cuda", simulated.link_bytes_per_s)
    assert (found.bandwidth, found.memory_bytes) == (simulated.bandwidth, simulated.memory_bytes)


def test_profile_before_roofline_and_measured_workspaces_before_both() -> None:
    known, other = product(4, 8, 2), product(4, 8, 3)
    key = signature(*known)
    profile = Profile({"device": "cpu"}, {key: Entry(ns=123, spread=12, workspace=7, samples=5)})
    costs = RooflineCosts(find_device("cpu"), profile)
    assert (costs.nanoseconds(*known), costs.workspace(*known)) == (123, 7)
    assert costs.price(*known) == Price(123, MEASURED, 12 / 123)
    assert costs.price(*other) == Price(roofline_ns(find_device("cpu"), *other), ESTIMATED)  # one kin is not enough
    assert costs.workspace(*other) == 0
    measured = RooflineCosts(find_device("cpu"), profile, {key: 9, signature(*other): 11})
    assert (measured.workspace(*known), measured.workspace(*other)) == (9, 11)
    assert device_model("cpu").price(*known).source == ESTIMATED


def test_a_measured_link_comes_before_the_datasheet() -> None:
    device = find_device("sim:h200")
    assert RooflineCosts(device, Profile({}, link=7)).link_bytes_per_s == 7
    assert RooflineCosts(device, Profile({})).link_bytes_per_s == device.link_bytes_per_s > 7
    assert RooflineCosts(device, Profile({}, copy_ns=9)).copy_ns == 9
    assert RooflineCosts(device, Profile({})).copy_ns == device.copy_ns > 9


def test_slack_makes_copies_as_long_as_on_the_worst_machine() -> None:
    costs = RooflineCosts(find_device("sim:h200"), slack=0.2)
    worst = machines(costs.nominal, 0.2)[-1]
    assert costs.link_bytes_per_s == pytest.approx(worst.link_bytes_per_s * worst.kernels)
    assert costs.copy_ns == round(worst.copy_ns / worst.kernels)
    assert costs.nominal == RooflineCosts(find_device("sim:h200"))


def convolution(dtype: str, mask: tuple[bool, ...] | None = None) -> tuple[Op, dict[int, Value]]:
    image, weight, out = (2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6)
    rest: tuple[Arg, ...] = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    if mask is None:
        values = {n: dense(n, *shape, dtype=dtype) for n, shape in enumerate((image, weight, out))}
        return Op(0, "aten.convolution.default", (Ref(0), Ref(1), None, *rest), (), (2,)), values
    values = {n: dense(n, *shape, dtype=dtype) for n, shape in enumerate((out, image, weight, image, weight))}
    args = (Ref(0), Ref(1), Ref(2), (0,), *rest, mask)
    return Op(0, "aten.convolution_backward.default", args, (), (3, 4, None)), values


def test_estimated_workspaces() -> None:
    gpu, cpu = device_model("sim:a100"), device_model("cpu")
    image, weight, out = 2 * 4 * 64, 6 * 4 * 9, 2 * 6 * 36
    forward, both = convolution("float32"), convolution("float32", (True, True, False))
    assert (gpu.workspace(*forward), gpu.workspace(*both)) == (0, 0)
    assert cpu.workspace(*forward) == 4 * (weight + out)
    assert cpu.workspace(*both) == 4 * (image + weight + out)
    assert gpu.workspace(*convolution("bfloat16", (True, True, False))) == 4 * weight
    assert gpu.workspace(*convolution("bfloat16", (True, False, False))) == 0
    assert gpu.workspace(*product(4, 8, 2)) == 0

    heads = {n: dense(n, 2, 4, 16, 8, dtype="bfloat16") for n in range(8)}
    args = (*(Ref(n) for n in range(6)), 0.0, False)
    name = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert gpu.workspace(Op(0, name, args, (), ()), heads) == 4 * (2 * 4 * 16 + 2 * 4 * 16 * 8)

    rows = {0: dense(0, 130, 8), 1: dense(1, 130, 8), 2: dense(2, 130, 1), 3: dense(3, 8)}
    norm_args: tuple[Arg, ...] = (
        Ref(0), Ref(1), (8,), Ref(2), Ref(2), Ref(3), Ref(3), (True, True, True),
    )  # fmt: skip
    norm = Op(0, "aten.native_layer_norm_backward.default", norm_args, (), ())
    assert gpu.workspace(norm, rows) == 2 * 4 * 8 * 3
    assert cpu.workspace(norm, rows) == 2 * 4 * 8 * 2

    index = {0: dense(0, 5, 8), 1: dense(1, 5, dtype="int64")}
    lookup = Op(0, "aten.embedding_dense_backward.default", (Ref(0), Ref(1), 100, -1, False), (), ())
    assert gpu.workspace(lookup, index) == 4 * 40
    drop = Op(0, "aten.native_dropout.default", (Ref(0), 0.1, True), (), ())
    assert (cpu.workspace(drop, index), gpu.workspace(drop, index)) == (4 * 40, 0)
