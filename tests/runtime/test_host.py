"""Host memory of swapped tensors, and the generator's states."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.runtime.measure import window_peak
from magis.runtime.swap_streams import HostMemory, StreamHost, make_host
from tests.oracles import same
from tests.runtime.simulated_gpu import SimulatedGpu

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@given(
    st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False), st.sampled_from(DTYPES),
    st.integers(0, 3), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_what_comes_back_is_what_left(
    sizes: list[int], random: object, dtype: torch.dtype, offset: int, expanded: bool, gaps: bool, streams: bool
) -> None:
    """With its strides: the bytes in a tensor's gaps come along."""
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    count = int(np.prod(sizes)) if sizes else 1
    flat = torch.arange(count + offset).to(dtype)
    tensor = flat[offset:].view(sizes).permute(order)
    if gaps and sizes:
        tensor = tensor[..., ::2]
    if expanded:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    host = make_host("cpu", SimulatedGpu() if streams else None)
    assert type(host) is (StreamHost if streams else HostMemory)
    stored = host.store(tensor)
    expected = tensor.clone()
    if not streams:
        flat.zero_()  # copied at once
    host.wait(tensor, stored)
    flat.zero_()  # the device's memory may be used again
    found = host.load(stored)
    host.ready(found)
    assert same(found, expected)
    assert found.stride() == tensor.stride()
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or found.numel() == 0
    again = host.load(stored)  # as often as wanted
    host.ready(again)
    assert same(again, found)


def test_the_copy_is_outside_of_torchs_memory() -> None:
    host = HostMemory()
    tensor = torch.ones(1000)
    assert window_peak(lambda: host.store(tensor)).peak_bytes == 0
    stored = host.store(tensor)
    assert window_peak(lambda: host.load(stored)).peak_bytes == 4000


def test_random_numbers_come_again_and_the_step_goes_on() -> None:
    host = HostMemory()
    torch.manual_seed(3)
    torch.rand(5)
    saved = host.rng_save()
    kept = saved.copy()
    first = torch.rand(4)
    assert np.array_equal(saved, kept)  # a copy
    after = torch.get_rng_state()
    expected = torch.rand(2)
    torch.set_rng_state(after)
    present = host.rng_enter(saved)
    again = torch.rand(4)
    host.rng_leave(present)
    assert same(first, again)
    assert same(torch.get_rng_state(), after)
    assert same(torch.rand(2), expected)
