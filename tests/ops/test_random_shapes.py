"""Families of operators at random shapes and arguments: cut, run in parts, put together, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hypothesis import assume, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

from magis.graph import Op, Value
from magis.ops.splits import Halo, Overlap, Split, splits
from tests.ops.catalogue import case_of
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


@given(shapes, st.data())
def test_broadcast(common: list[int], data: st.DataObject) -> None:
    def narrowed() -> str:
        kept = common[data.draw(st.integers(0, len(common))) :]
        return tensor([1 if data.draw(st.integers(0, 3)) == 0 else size for size in kept])

    name = data.draw(st.sampled_from(["add.Tensor", "mul.Tensor", "maximum.default", "sub.Tensor"]))
    check(f"{name}({narrowed()}, {narrowed()})")
    check(f"addcmul.default({narrowed()}, {narrowed()}, {narrowed()}, value=0.5)")
    check(f"where.self({narrowed().replace('f', 'b')}, {narrowed()}, {narrowed()})")
    check(f"mul_.Tensor({tensor(common)}, {narrowed()})")
    check(f"copy_.default({tensor(common)}, {narrowed()})")


@given(shapes, st.data())
def test_expand_and_repeat(shape: list[int], data: st.DataObject) -> None:
    front = data.draw(st.lists(sizes, max_size=2))
    wide = [data.draw(sizes) if size == 1 else data.draw(st.sampled_from([size, -1])) for size in shape]
    check(f"expand.default({tensor(shape)}, {listed([*front, *wide])})")
    times = data.draw(st.lists(st.integers(1, 4), min_size=len(front) + len(shape), max_size=len(front) + len(shape)))
    check(f"repeat.default({tensor(shape)}, {listed(times)})")


@given(shapes, st.data())
def test_rearranged(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    dims = st.integers(-rank, rank - 1)
    order = data.draw(st.permutations(range(rank)))
    check(f"permute.default({tensor(shape)}, {listed(order)})")
    check(f"transpose.int({tensor(shape)}, {data.draw(dims)}, {data.draw(dims)})")
    check(f"unsqueeze.default({tensor(shape)}, {data.draw(st.integers(-rank - 1, rank))})")
    check(f"squeeze.default({tensor(shape)})")
    check(f"squeeze.dim({tensor(shape)}, {data.draw(dims)})")
    dim = data.draw(dims)
    check(f"select.int({tensor(shape)}, {dim}, {data.draw(st.integers(0, shape[dim] - 1))})")
    start, end = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    check(f"slice.Tensor({tensor(shape)}, {dim}, {start}, {end}, {data.draw(st.integers(1, 3))})")
    check(f"flip.default({tensor(shape)}, {listed([dim])})")


@given(st.data())
def test_matrix_products(data: st.DataObject) -> None:
    b, m, k, n = (data.draw(sizes) for _ in range(4))
    check(f"mm.default({tensor([m, k])}, {tensor([k, n])})")
    check(f"bmm.default({tensor([b, m, k])}, {tensor([b, k, n])})")
    bias = data.draw(st.sampled_from([[n], [1, n], [m, n], [m, 1], [1]]))
    check(f"addmm.default({tensor(bias)}, {tensor([m, k])}, {tensor([k, n])})")
    batched = data.draw(st.sampled_from([[n], [b, 1, n], [1, m, 1], [b, m, n]]))
    check(f"baddbmm.default({tensor(batched)}, {tensor([b, m, k])}, {tensor([b, k, n])}, beta=0.5)")
    check(f"mv.default({tensor([m, k])}, {tensor([k])})")
    check(f"linear.default({tensor([b, m, k])}, {tensor([n, k])}, {tensor([n])})")


@given(shapes, st.data())
def test_reductions(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    dims = data.draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=rank))
    asked = listed([dim - rank if data.draw(flags) else dim for dim in dims])
    for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"):
        check(f"{name}({tensor(shape)}, {asked}, {data.draw(flags)})")
    assume(prod(shape[dim] for dim in dims or range(rank)) > 1)
    check(f"var.correction({tensor(shape)}, {asked}, correction=1, keepdim={data.draw(flags)})")


@given(shapes, st.data())
def test_along_one_dimension(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    check(f"_softmax.default({tensor(shape)}, {dim}, False)")
    check(f"_log_softmax_backward_data.default({tensor(shape)}, {tensor(shape)}, {dim}, dtype:float64)")
    check(f"cumsum.default({tensor(shape)}, {dim})")
    check(f"max.dim({tensor(shape)}, {dim}, {data.draw(flags)})")
    check(f"sort.default({tensor(shape)}, {dim})")


@given(shapes, st.data())
def test_put_together_and_taken_apart(shape: list[int], data: st.DataObject) -> None:
    rank = len(shape)
    dim = data.draw(st.integers(-rank, rank - 1))
    lengths = data.draw(st.lists(sizes, min_size=1, max_size=3))
    pieces = [[length if place == dim % rank else size for place, size in enumerate(shape)] for length in lengths]
    check(f"cat.default({listed([tensor(piece) for piece in pieces])}, {dim})")
    check(f"stack.default({listed([tensor(shape)] * len(lengths))}, {data.draw(st.integers(-rank - 1, rank))})")
    check(f"split.Tensor({tensor(shape)}, {data.draw(sizes)}, {dim})")
    check(f"unbind.int({tensor(shape)}, {dim})")
    whole = [sum(lengths) if place == dim % rank else size for place, size in enumerate(shape)]
    check(f"split_with_sizes.default({tensor(whole)}, {listed(lengths)}, {dim})")
    margins = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2))
    check(f"constant_pad_nd.default({tensor(shape)}, {listed(margins)})")


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


@given(st.data())
def test_pooling(data: st.DataObject) -> None:
    leading = data.draw(st.sampled_from([[2], [4, 3], [2, 6]]))
    kernel, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    padding = data.draw(st.integers(0, kernel // 2))
    image = tensor([*leading, *(data.draw(st.integers(3, 8)) for _ in range(2))])
    ceil = data.draw(flags)
    settings = f"{[kernel] * 2}, {[stride] * 2}, {[padding] * 2}"
    case = check(f"max_pool2d_with_indices.default({image}, {settings}, [1, 1], {ceil})")
    made = case.values[case.op.made()[0]].shape
    check(
        f"max_pool2d_with_indices_backward.default({tensor(made)}, {image}, {settings}, [1, 1], {ceil},"
        f" {tensor(made, 'i')})"
    )
    small = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))]
    check(f"_adaptive_avg_pool2d.default({image}, {small})")
    check(f"_adaptive_avg_pool2d_backward.default({tensor([*leading, *small])}, {image})")


@given(st.data())
def test_resizing(data: st.DataObject) -> None:
    n, c, height, width = data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    large = [height * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))]
    small = tensor([n, c, height, width])
    for name, aligned in (("nearest2d", ""), ("bilinear2d", f", {data.draw(flags)}")):
        check(f"upsample_{name}.default({small}, {large}{aligned})")
        check(f"upsample_{name}_backward.default({tensor([n, c, *large])}, {large}, {[n, c, height, width]}{aligned})")


@given(st.data())
def test_normalizations(data: st.DataObject) -> None:
    n, groups, each, places = data.draw(sizes), data.draw(sizes), data.draw(st.integers(1, 3)), data.draw(sizes)
    channels = groups * each
    assume(n * places > 1)
    image, one = tensor([n, channels, places]), tensor([channels])
    training = data.draw(flags)
    check(f"native_batch_norm.default({image}, {one}, {one}, {one}, {one}, {training}, 0.1, 1e-05)")
    mask = [True, data.draw(flags), data.draw(flags)]
    check(
        f"native_batch_norm_backward.default({image}, {image}, {one}, {one}, {one}, {one}, {one}, {training}, 1e-05,"
        f" {mask})"
    )
    check(f"native_group_norm.default({image}, {one}, {one}, {n}, {channels}, {places}, {groups}, 1e-05)")
    per_group = tensor([n, groups])
    check(
        f"native_group_norm_backward.default({image}, {image}, {per_group}, {per_group}, {one}, {n}, {channels},"
        f" {places}, {groups}, [True, True, True])"
    )
    row = tensor([places])
    check(f"native_layer_norm.default({image}, [{places}], {row}, {row}, 1e-05)")
    saved = tensor([n, channels, 1])
    check(f"native_layer_norm_backward.default({image}, {image}, [{places}], {saved}, {saved}, {row}, {row}, {mask})")


@given(st.data())
def test_indices(data: st.DataObject) -> None:
    """Index tensors at some of the dimensions, broadcast against each other; what they choose is put back too."""
    shape = data.draw(st.lists(sizes, min_size=2, max_size=4))
    chosen = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    common = data.draw(st.lists(sizes, max_size=2))
    indices = ["None"] * len(shape)
    for dim in chosen:
        kept = common[data.draw(st.integers(0, len(common))) :] if len(chosen) > 1 else common
        indices[dim] = tensor([1 if data.draw(flags) else size for size in kept], "i")
    case = check(f"index.Tensor({tensor(shape)}, {listed(indices)})")
    made = tensor(case.values[case.op.made()[0]].shape)
    check(f"index_put.default({tensor(shape)}, {listed(indices)}, {made}, True)")
    dim = data.draw(st.integers(0, len(shape) - 1))
    check(f"index_select.default({tensor(shape)}, {dim}, {tensor([data.draw(sizes)], 'i')})")
    smaller = [data.draw(st.integers(1, size)) for size in shape]
    check(f"gather.default({tensor(shape)}, {dim}, {tensor(smaller, 'i')})")
    check(f"scatter_add.default({tensor(shape)}, {dim}, {tensor(smaller, 'i')}, {tensor(smaller)})")


@given(st.data())
def test_losses(data: st.DataObject) -> None:
    rows, classes, reduction = data.draw(sizes), data.draw(st.integers(2, 5)), data.draw(st.integers(0, 2))
    ignored = data.draw(st.sampled_from([-100, 1]))
    weight = data.draw(st.sampled_from(["None", tensor([classes])]))
    scores, targets = tensor([rows, classes]), tensor([rows], "i")
    check(f"nll_loss_forward.default({scores}, {targets}, {weight}, {reduction}, {ignored})")
    gradient = tensor([rows] if reduction == 0 else [])
    check(f"nll_loss_backward.default({gradient}, {scores}, {targets}, {weight}, {reduction}, {ignored}, f[])")
    shape = data.draw(shapes)
    check(f"mse_loss.default({tensor(shape)}, {tensor(shape)}, {reduction})")
    gradient = tensor(shape if reduction == 0 else [])
    check(f"mse_loss_backward.default({gradient}, {tensor(shape)}, {tensor(shape)}, {reduction})")


@given(st.data())
def test_attention(data: st.DataObject) -> None:
    batch, heads, rows, keys = (data.draw(sizes) for _ in range(4))
    causal = data.draw(flags)
    query, key = tensor([batch, heads, rows, 8]), tensor([batch, heads, rows if causal else keys, 8])
    mask = "None" if causal else data.draw(
        st.sampled_from(["None", tensor([rows, keys]), tensor([1, heads, 1, keys]), tensor([batch, 1, rows, keys])])
    )  # fmt: skip
    name = "_scaled_dot_product_flash_attention_for_cpu"
    check(f"{name}.default({query}, {key}, {key}, 0.0, {causal}, attn_mask={mask})")
    saved = f"{query}, {tensor([batch, heads, rows])}"
    check(f"{name}_backward.default({query}, {query}, {key}, {key}, {saved}, 0.0, {causal}, attn_mask={mask})")


@given(shapes, st.sampled_from(["zeros", "ones", "full", "empty"]))
def test_factories(shape: list[int], name: str) -> None:
    overload = "memory_format" if name == "empty" else "default"
    case = check(f"{name}.{overload}({listed(shape)}{', 0.5' if name == 'full' else ''})")
    assert len(splits(case.op, case.values)) == sum(size > 1 for size in shape)


@given(st.lists(st.integers(0, 3), max_size=3))
def test_empty_tensors_have_no_splits_that_fail(shape: list[int]) -> None:
    check(f"add.Tensor({tensor(shape)}, f[])")
    case = check(f"sum.dim_IntList({tensor(shape)}, [])")
    assert isinstance(case.op, Op)
    assert all(isinstance(value, Value) for value in case.values.values())
