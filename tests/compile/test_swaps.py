"""Swaps of saved tensors: eager's numbers, the planned bytes, and only where a limit is not met as well without."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

from magis.errors import UsageError
from magis.extensions.compile import joint_swaps
from magis.extensions.compile.compile_options import CompileReport, OptionError, as_options
from magis.extensions.compile.dynamo_backend import magis
from magis.extensions.compile.inductor_partitioner import partition
from magis.extensions.compile.joint_swaps import SavedOnHost
from magis.frontends.block_peak import peak
from magis.runtime.swap_streams import StreamHost
from tests.compile.nets import Twins, chain, fresh_dynamo, targets_of
from tests.runtime.simulated_gpu import SimulatedGpu, at_random, earliest_copies, latest_copies

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:magis. no plan found"),
]
LINK = 25e9


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_dynamo():
        yield


def batch(seed: int = 1, width: int = 32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(512, width, generator=made), torch.randn(512, width, generator=made)


def gradients_of(module: nn.Module, *losses: Tensor) -> list[Tensor]:
    module.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    return [each.grad for each in module.parameters() if each.grad is not None]


PARTS: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "plain": (),
    "dropout": (lambda: nn.Dropout(0.3),),
    "norms": (lambda: nn.BatchNorm1d(32), lambda: nn.LayerNorm(32)),
}


@pytest.mark.parametrize("parts", PARTS)
def test_numbers_are_eagers_and_bytes_the_planned_ones(parts: str) -> None:
    twins = Twins(chain(32, 8, *PARTS[parts]), F.mse_loss, memory_ratio=0.5, link=LINK, budget=300)
    for seed in range(3):
        twins.step(seed, *batch(seed))
    (report,) = twins.reports
    assert report.swapped_bytes
    assert "to host memory and back" in str(report)
    assert twins.peak(*batch()) == report.planned_bytes


@pytest.mark.parametrize("link", [0, LINK])
def test_copies_and_generator_states_on_the_host_are_no_tensors_of_the_step(link: float) -> None:
    module, (x, y) = chain(32, 8, *PARTS["dropout"]), batch()
    reports: list[CompileReport] = []
    options = {"memory_ratio": 0.5, "link": link, "budget": 300, "report": reports.append}
    call = torch.compile(lambda: F.mse_loss(module(x), y), backend=magis, options=options)
    gradients_of(module, call())
    module.zero_grad(set_to_none=True)
    with peak() as counted:
        call().backward()
    held = sum(each.nbytes for each in (*module.parameters(), x, y))
    (report,) = reports
    assert bool(report.swapped_bytes) == bool(link)
    assert link or "native_dropout" in targets_of(report.recomputed)
    assert counted.allocated_bytes is not None
    assert counted.allocated_bytes + held == report.planned_bytes
    assert counted.tensor_bytes <= counted.allocated_bytes  # without scratch


def test_a_device_without_a_link_swaps_nothing() -> None:
    reports: list[CompileReport] = []
    for settings in ({}, {"link": 0}):
        twins = Twins(chain(), F.mse_loss, memory_ratio=0.5, **settings)
        twins.step(0, *batch())
        reports += twins.reports
    assert [report.swapped_bytes for report in reports] == [0, 0]
    assert reports[0].planned_bytes == reports[1].planned_bytes


def test_what_recomputation_meets_at_no_cost_is_not_swapped() -> None:
    twins = Twins(chain(), F.mse_loss, memory_ratio=1.0, link=LINK)
    twins.step(0, *batch())
    assert twins.reports[0].swapped_bytes == 0


def test_swaps_meet_a_limit_in_less_time_than_recomputation_and_a_slow_link_is_left_alone() -> None:
    found = {}
    for link in (0, 1e6, LINK):
        torch.compiler.reset()
        twins = Twins(chain(32, 8), F.mse_loss, memory_ratio=0.6, link=link)
        twins.step(0, *batch())
        found[link] = twins.reports[0]
    assert all(report.feasible for report in found.values())
    assert found[1e6].swapped_bytes == 0
    assert found[LINK].latency_ratio < found[0].latency_ratio == found[1e6].latency_ratio


def test_swaps_meet_a_limit_that_recomputation_does_not() -> None:
    found = []
    for link in (0, LINK):
        torch.compiler.reset()
        twins = Twins(chain(32, 14), F.mse_loss, memory_ratio=0.35, link=link, budget=300)
        twins.step(0, *batch())
        found.append(twins.reports[0])
    assert [report.feasible for report in found] == [False, True]


def test_no_more_is_swapped_than_the_limit_wants() -> None:
    swapped = []
    for ratio in (0.9, 0.7):
        torch.compiler.reset()
        twins = Twins(chain(32, 8), F.mse_loss, memory_ratio=ratio, link=100e9)
        twins.step(0, *batch())
        (report,) = twins.reports
        swapped.append(report.swapped_bytes)
        assert report.feasible
    assert 0 < swapped[0] < swapped[1]


def test_two_forwards_before_a_backward_keep_their_own_copies() -> None:
    module = chain(32, 8)
    call = torch.compile(
        lambda x, y: F.mse_loss(module(x), y), backend=magis, options={"memory_ratio": 0.5, "link": LINK, "budget": 60}
    )

    alone = [gradients_of(module, call(*batch(seed))) for seed in range(2)]
    together = gradients_of(module, *reversed([call(*batch(seed)) for seed in range(2)]))
    for first, second, both in zip(*alone, together, strict=True):
        assert torch.equal(second + first, both)


def test_host_memory_goes_with_the_saved_tensor() -> None:
    host = SavedOnHost("cpu")
    tensor = torch.randn(4, 6)[:, 1:5].t()
    saved = host.store(tensor)
    assert torch.equal(host.load(saved), tensor)
    assert host.load(saved).stride() == tensor.stride()
    assert len(host._stored) == 1
    del saved
    gc.collect()
    assert not host._stored


def test_hooks_that_replace_saved_tensors_are_told_what_to_do() -> None:
    module = chain(32, 8)
    options = {"memory_ratio": 0.5, "link": LINK, "budget": 60}
    call = torch.compile(lambda x, y: F.mse_loss(module(x), y), backend=magis, options=options)
    call(*batch()).backward()
    with saved_tensors_hooks(lambda each: each.clone(), lambda each: each):
        loss = call(*batch())
    with pytest.raises(UsageError, match="a hook replaced a saved tensor") as caught:
        loss.backward()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("link", ["fast", -1, 10, True, float("nan")])
def test_a_wrong_link_is_one_line(link: object) -> None:
    with pytest.raises(OptionError, match="link=") as caught:
        as_options({"link": link})
    assert "\n" not in str(caught.value)


def test_inductors_code_swaps_nothing() -> None:
    assert as_options({"inductor": True}).link == 0
    with pytest.raises(OptionError, match="inductor=True has no swaps"):
        as_options({"inductor": True, "link": LINK})


ORDERS = {"late": latest_copies, "early": earliest_copies, "random": at_random(0)}


@pytest.mark.parametrize("parts", ["dropout", "norms"])
def test_copy_streams_run_beside_the_operators_in_any_order(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, on a device with streams that exists on paper."""
    gpu = SimulatedGpu()
    monkeypatch.setattr(joint_swaps, "make_host", lambda device: StreamHost(device, gpu))
    options = as_options({"memory_ratio": 0.5, "link": LINK, "budget": 300})

    def recorded(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        run = boxed_nop(module, inputs)

        def call(args: list[Any]) -> Any:
            with gpu:
                return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    module = chain(32, 8, *PARTS[parts])
    backend = aot_autograd(
        fw_compiler=recorded,
        partition_fn=partial(partition, options=options),
        keep_inference_input_mutations=True,
    )
    call = torch.compile(lambda x, y: F.mse_loss(module(x), y), backend=backend)
    kept = [gradients_of(module, call(*batch(seed))) for seed in range(2)]
    assert len(kept[0]) == len(kept[1])
    assert gpu.streams == 3
    assert gpu.pinned_bytes
    assert gpu.races() == []
    assert [name for name, choose in ORDERS.items() if gpu.wrong(choose)] == []
