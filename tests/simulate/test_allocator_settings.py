"""Settings of the caching allocator: read as torch reads them, refused in one line."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import UsageError
from magis.simulate.allocator_settings import DEFAULTS, KEYS, AllocatorSettings, allocator_settings, allocator_text
from tests.plain_allocator import MIB
from tests.strategies import examples

DIVISIONS = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
"""The function of torch that says into how many sizes an interval is divided."""
POWERS = [2**power for power in range(18)]


@pytest.fixture(scope="module")
def torch_divisions() -> Iterator[Callable[[str], list[int]]]:
    """Torch's own reading of settings, from its compiled code."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        read = getattr(ctypes.CDLL(str(library)), DIVISIONS)
    except (AttributeError, OSError):
        pytest.skip("this build of torch does not export its settings")
    read.restype, read.argtypes = ctypes.c_size_t, [ctypes.c_size_t]

    def divisions(text: str) -> list[int]:
        torch._C._accelerator_setAllocatorSettings(text)
        return [read(2**power) for power in range(20, 36)]

    yield divisions
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")


PAIRS = st.lists(st.tuples(st.sampled_from([*map(str, POWERS), ">"]), st.sampled_from([0, *POWERS[:8]])), min_size=1)


@given(st.one_of(st.sampled_from(POWERS[:8]), PAIRS))
@examples(200)
def test_divisions_are_those_that_torch_reads(
    torch_divisions: Callable[[str], list[int]], wanted: int | list[tuple[str, int]]
) -> None:
    value = wanted if isinstance(wanted, int) else f"[{','.join(f'{begin}:{count}' for begin, count in wanted)}]"
    text = f"roundup_power2_divisions:{value}"
    assert list(allocator_settings(text).divisions) == torch_divisions(text)


@given(st.integers(1, 80 * 2**30), st.sampled_from([1, 2, 4, 8, 64, 1024]))
@examples(300)
def test_a_request_is_rounded_up_to_a_division(nbytes: int, divisions: int) -> None:
    rounded = AllocatorSettings(divisions=(divisions,) * 16).rounded(nbytes)
    assert nbytes <= rounded
    assert rounded % 512 == 0
    if divisions == 1 or nbytes <= 512 * divisions:
        assert rounded < nbytes + 512
    else:
        floor = 2 ** int(math.log2(nbytes))
        assert rounded - nbytes < floor // divisions
        assert (rounded - floor) % (floor // divisions) == 0


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", DEFAULTS),
        (" , ", DEFAULTS),
        ("backend:native", DEFAULTS),
        ("expandable_segments:False,", DEFAULTS),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        ("max_split_size_mb: 128", AllocatorSettings(max_split_bytes=128 * MIB)),
        ("max_non_split_rounding_mb:30", AllocatorSettings(max_rounding_bytes=30 * MIB)),
        ("large_segment_size_mb:15,max_split_size_mb:16", AllocatorSettings(False, 16 * MIB, 20 * MIB, 15 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorSettings(collection_threshold=0.8)),
        ("per_process_memory_fraction:1,per_process_memory_fraction:0.5", AllocatorSettings(memory_fraction=0.5)),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", AllocatorSettings(divisions=(1,) * 9 + (2,) + (8,) * 6)),
    ],
)
def test_settings_are_read(text: str, settings: AllocatorSettings) -> None:
    assert allocator_settings(text) == settings


OF_CUDA = ("backend", "per_process")
REFUSED = {
    "max_split_size_mb:19": "max_split_size_mb:19: must be at least 20",
    "max_split_size_mb:20,large_segment_size_mb:25": "max_split_size_mb must be at least large_segment_size_mb",
    "large_segment_size_mb:10": "large_segment_size_mb:10: must be at least 11",
    "max_split_size_mb": "max_split_size_mb:: '' is not a whole number",
    "max_split_size_mb:": "max_split_size_mb:: '' is not a whole number",
    "max_split_size_mb:many": "'many' is not a whole number",
    "expandable_segments:true": "expandable_segments:true: write True or False",
    "garbage_collection_threshold:1.0": "must be a number above 0 and below 1",
    "garbage_collection_threshold:nan": "must be a number above 0 and below 1",
    "roundup_power2_divisions:3": "3 is no power of 2",
    "roundup_power2_divisions:0": "0 is no power of 2",
    "roundup_power2_divisions:[3:2]": "3 is no power of 2",
    "roundup_power2_divisions:[256:3]": "3 is no power of 2",
    "roundup_power2_divisions:[256:1,>:8": "the list has no end",
    "expandable_segment:True": "did you mean expandable_segments?",
    "backend:cudaMallocAsync": "backend:cudaMallocAsync: not simulated",
    "per_process_memory_fraction:2": "must be a number above 0 and at most 1",
    "pinned_use_background_threads:True": "it has no part in the bytes reserved on the device",
    "pinned_use_cuda_host_register:True": "it has no part in the bytes reserved on the device",
}


@pytest.mark.parametrize("text", REFUSED)
def test_others_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        allocator_settings(text, "PYTORCH_ALLOC_CONF")
    said = str(caught.value)
    assert said.startswith("PYTORCH_ALLOC_CONF: ")
    assert REFUSED[text] in said
    assert "\n" not in said


def test_what_is_refused_torch_refuses_too(torch_divisions: Callable[[str], list[int]]) -> None:
    """Keys apart that torch reads elsewhere, or that are not simulated."""
    for text in REFUSED:
        if text.partition(":")[0] in KEYS and not text.startswith(OF_CUDA):
            with pytest.raises((ValueError, RuntimeError)):
                torch_divisions(text)


def test_the_environment_counts_where_nothing_is_given() -> None:
    growing, split = "expandable_segments:True", "max_split_size_mb:64"
    both = {"PYTORCH_ALLOC_CONF": split, "PYTORCH_CUDA_ALLOC_CONF": f" {growing} ,"}
    assert allocator_text(None, "sim:h100", both) == growing
    assert allocator_text(None, "sim:h100", {"PYTORCH_ALLOC_CONF": split}) == split
    assert allocator_text(None, "cpu", both) == ""
    assert allocator_text("", "sim:h100", both) == ""
    assert allocator_text("backend:native", "sim:h100", both) == ""
    assert allocator_text(split, "sim:h100", both) == split
    with pytest.raises(UsageError, match="a CPU has no caching allocator"):
        allocator_text(growing, "cpu", {})
    with pytest.raises(UsageError, match=r"^PYTORCH_ALLOC_CONF: 'pinned_max_cached_size_mb' is not simulated"):
        allocator_text(None, "sim:h100", {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:4"})
