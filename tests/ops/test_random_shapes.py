"""Families of operators at random shapes and arguments: cut, run in parts, put together, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import assume, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from magis.ops.splits import Halo, Overlap, Split, splits
from tests.ops.calls import case_of
from tests.ops.cutting import Case, problems
from tests.strategies import is_soak

sizes = st.sampled_from([1, 2, 3, 4, 6])
shapes = st.lists(sizes, min_size=1, max_size=4)
flags = st.booleans()


def given(*strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis's own, with fewer examples outside of soak runs: the catalogue tries every rule."""
    return lambda test: drawn(*strategies)(test if is_soak() else settings(max_examples=40)(test))


def tensor(shape: Sequence[int], kind: str = "f") -> str:
    return f"{kind}[{','.join(map(str, shape))}]"


def listed(items: Sequence[object]) -> str:
    return "[" + ", ".join(map(str, items)) + "]"


def check(line: str) -> Case:
    """The call of a line, whose splits must hold."""
    case = case_of(line)
    assert problems(case, largest=12) == []
    return case


@st.composite
def grouped(draw: st.DrawFn, factors: Sequence[int]) -> list[int]:
    """A shape whose sizes are products of neighbouring factors, ones strewn in."""
    shape = [1]
    for factor in factors:
        if draw(flags):
            shape.append(factor)
        else:
            shape[-1] *= factor
    for _ in range(draw(st.integers(0, 1))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape


@given(st.data())
def test_views(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=5))
    before, after = data.draw(grouped(factors)), data.draw(grouped(factors))
    asked = list(after)
    if data.draw(flags):
        asked[data.draw(st.integers(0, len(after) - 1))] = -1
    name = data.draw(st.sampled_from(["view", "_unsafe_view", "reshape", "_reshape_copy"]))
    case = check(f"{name}.default({tensor(before)}, {listed(asked)})")
    # equal leading dimensions larger than 1 can always be cut
    leading = [next((size for size in shape if size > 1), 1) for shape in (before, after)]
    assert splits(case.op, case.values) or leading[0] != leading[1]


@given(shapes, st.data())
def test_a_reshape_of_another_layout(shape: list[int], data: st.DataObject) -> None:
    """Where elements do not lie row by row, torch copies."""
    order = data.draw(st.permutations(range(len(shape))))
    steps = [0] * len(shape)
    reach = 1
    for dim in order:
        steps[dim], reach = reach, reach * shape[dim]
    check(f"reshape.default({tensor(shape)}{{{','.join(map(str, steps))}}}, {listed([-1])})")


@given(st.data())
def test_convolutions(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([1, 1, 2, 4]))
    n, inner, outer = (data.draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    transposed = data.draw(flags)
    kernel, stride, padding, dilation = (data.draw(st.integers(*ends)) for ends in ((1, 3), (1, 3), (0, 1), (1, 2)))
    height, width = (data.draw(st.integers(4, 8)) for _ in range(2))
    assume(padding <= dilation * (kernel - 1))
    weight = [groups * inner, outer, kernel, kernel] if transposed else [groups * outer, inner, kernel, kernel]
    biased = data.draw(flags)
    image = tensor([n, groups * inner, height, width])
    settings = f"{[stride] * 2}, {[padding] * 2}, {[dilation] * 2}, {transposed}, [0, 0], {groups}"
    bias = tensor([groups * outer]) if biased else "None"
    case = check(f"convolution.default({image}, {tensor(weight)}, {bias}, {settings})")
    made = tensor(case.values[case.op.made()[0]].shape)
    mask = [data.draw(flags), data.draw(flags), biased]
    assume(any(mask))
    sized = listed([groups * outer]) if biased else data.draw(st.sampled_from(["None", "[0]"]))
    check(f"convolution_backward.default({made}, {image}, {tensor(weight)}, {sized}, {settings}, {mask})")


@given(st.data())
def test_overlapping_windows(data: st.DataObject) -> None:
    """Places are cut wherever the larger picture is as many times the smaller one as the stride says; halos may reach
    over several parts."""
    groups, transposed = data.draw(st.sampled_from([1, 3])), data.draw(flags)
    kernel, stride, dilation = ([data.draw(st.integers(1, most)) for _ in range(2)] for most in (7, 2, 2))
    spans = [(size - 1) * spread + 1 for size, spread in zip(kernel, dilation, strict=True)]
    padding = [data.draw(st.sampled_from([span // 2, span - 1, 0])) for span in spans]
    small = [data.draw(st.sampled_from([4, 6, 8])) for _ in range(2)]
    large = [size * step for size, step in zip(small, stride, strict=True)]
    # neither picture may come out empty
    assume(all(size + 2 * margin >= span for size, margin, span in zip(large, padding, spans, strict=True)))
    assume(not transposed or all((small[at] - 1) * stride[at] + spans[at] > 2 * padding[at] for at in range(2)))
    extra = [data.draw(st.integers(0, step - 1)) if transposed else 0 for step in stride]
    weight = tensor([3, 1 if groups == 3 else 2, *kernel] if transposed else [3, 3 // groups, *kernel])
    channels = 3 if groups == 3 or not transposed else 2
    image = tensor([1, 3, *(small if transposed else large)])
    settings = f"{stride}, {padding}, {dilation}, {transposed}, {extra}, {groups}"
    bias = data.draw(st.sampled_from(["None", tensor([channels])]))
    case = check(f"convolution.default({image}, {weight}, {bias}, {settings})")
    made = case.values[case.op.made()[0]].shape
    picture = list(made[2:])
    fits = [picture[at] == (large if transposed else small)[at] and 0 < padding[at] < spans[at] for at in range(2)]
    expected = [fits[at] and not (transposed and bias != "None") for at in range(2)]
    assert [any(halo_along(split, at + 2) for split in splits(case.op, case.values)) for at in range(2)] == expected
    mask = [data.draw(flags), data.draw(flags), data.draw(flags)]
    assume(any(mask))
    sized = listed([channels]) if mask[2] else "None"
    case = check(f"convolution_backward.default({tensor(made)}, {image}, {weight}, {sized}, {settings}, {mask})")
    expected = [fits[at] and not (transposed and mask[2]) for at in range(2)]
    assert [any(halo_along(split, at + 2) for split in splits(case.op, case.values)) for at in range(2)] == expected


def halo_along(split: Split, dim: int) -> bool:
    """Whether the split takes rows next to a stretch, or adds to them."""
    return any(isinstance(how, Halo | Overlap) and how.dim == dim for how in (*split.inputs, *split.outputs))


@given(st.data())
def test_overlapping_pooling(data: st.DataObject) -> None:
    kernel, stride = ([data.draw(st.integers(1, most)) for _ in range(2)] for most in (5, 4))
    padding = [data.draw(st.integers(0, size // 2)) for size in kernel]
    image = tensor([2, *(step * data.draw(st.sampled_from([6, 8])) for step in stride)])
    padded, ceil = data.draw(flags), data.draw(flags)
    divisor = data.draw(st.sampled_from([None, 3]))
    settings = f"{kernel}, {stride}, {padding}, {ceil}, {padded}, {divisor}"
    case = check(f"avg_pool2d.default({image}, {settings})")
    pooled = case.values[case.op.made()[0]].shape
    back = check(f"avg_pool2d_backward.default({tensor(pooled)}, {image}, {settings})")
    for at in range(2):
        fits = pooled[at + 1] * stride[at] == case.values[0].shape[at + 1] and padding[at] > 0 and not ceil
        for each in (case, back):
            found = any(halo_along(split, at + 1) for split in splits(each.op, each.values))
            assert found == (fits and (padded or divisor is not None))
