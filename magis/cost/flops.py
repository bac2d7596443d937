"""Floating-point operations, bytes and kernels of an operator, from shapes alone.

Bytes are counted as a kernel running alone moves them: every input once (an expanded dimension, stride 0, once in all),
every output once, and data that the kernel's algorithm passes over twice, twice. Operators that read part of an input
(embedding, gradients of slices, nll_loss) are charged for that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from magis.graph.nodes import ITEM_SIZE, Op, Ref, Value
from magis.ops.op_info import OpInfo
from magis.ops.operators import name_of, op_info

# Operators on lists of tensors (``_foreach_*``, ``_fused_*``): how many kernels a GPU runs for one call.
# A kernel gets the addresses of as many tensors as fit into its arguments, in pieces of 65,536 elements with a
# block of threads each (ATen/native/cuda/MultiTensorApply.cuh). The call starts another one as soon as it is full
# of either. A CPU runs the plain operator, tensor by tensor.

CHUNK = 65_536
MOST_BLOCKS = 320
MOST_TENSORS = (110, 64, 48, 36, 30)
"""Most tensors per list that one foreach kernel takes, by the number of lists."""
MOST_WITH_NUMBERS = (96, 64, 48, 36, 30)
"""Most tensors per list that one foreach kernel with a scalar per tensor takes, by the number of lists."""


def is_on_lists(target: str) -> bool:
    """Return True for foreach and fused operators on lists of tensors."""
    return target.startswith(("aten._foreach_", "aten._fused_")) and not target.startswith("aten._fused_rms_norm")


def tensors_and_kernels(op: Op, values: Mapping[int, Value]) -> tuple[int, int]:
    """Return the numbers of tensors and of GPU kernels of one foreach call; 1 and 1 for other operators."""
    lists = [arg for arg in op.args if isinstance(arg, tuple) and arg and isinstance(arg[0], Ref)]
    if not lists or not is_on_lists(op.target):
        return 1, 1
    sizes = [values[item.value].numel for item in lists[0] if isinstance(item, Ref)]
    if max(sizes) > 1:  # step counters next to larger tensors are scalars, not operands
        numbers = [all(isinstance(item, Ref) and values[item.value].shape == () for item in each) for each in lists]
        lists = [each for each, are_numbers in zip(lists, numbers, strict=True) if not are_numbers]
    depth = min(max(1, len(lists) + bool(op.made())), len(MOST_TENSORS))
    most = (MOST_WITH_NUMBERS if op.target.endswith(".ScalarList") else MOST_TENSORS)[depth - 1]
    return len(sizes), _kernels(sizes, most)


def _kernels(sizes: list[int], most: int) -> int:
    """Return the number of kernels for tensors of these sizes, with at most `most` tensors per kernel."""
    kernels = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // CHUNK)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            whole = chunk == chunks - 1
            if blocks == MOST_BLOCKS or (tensors == most and whole):
                kernels, blocks = kernels + 1, 0
                tensors = 0 if whole else 1
    return max(1, kernels + bool(blocks))


_DESTINATIONS = frozenset({"out", "grad_input"})
"""Keyword arguments for the destination of an operator's `out` variant."""

INNER_DEPTH = 4_096
"""Reduction length of a matrix product above which libraries split the sum among multiprocessors (split-K)."""

_EASY_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
"""Exponents that kernels compute by multiplications and square roots."""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """Arithmetic and memory traffic of one call.

    `kind` is the operator's `OpInfo.kind`, "view", or "strided_copy" (a copy that changes the innermost dimension);
    `dtype` is the dtype of the arithmetic.
    """

    kind: str
    name: str
    """Name of the operator; "square" for a power that is computed by multiplications."""
    dtype: str
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    fresh_bytes: int = 0
    """Part of the written bytes that goes to newly allocated storages."""
    results: int = 0
    """Output elements that can be computed in parallel; with split-K, one per `INNER_DEPTH` products."""
    elements: int = 0
    """Elements processed one by one: of inputs or outputs, pooling windows, attention scores."""
    smallest_dimension: int = 0
    """Smallest of a matrix product's dimensions m, n, k; 0 for other operators."""
    smallest_channels: int = 0
    """Smaller of a convolution's output channels and products per output, both per group; 0 for other operators."""
    channels_last: bool = False
    """True if the image of a convolution or batch norm is in channels_last memory format."""
    tensors: int = 1
    """Number of tensors in the list of a foreach operator."""
    launches: int = 1
    """Number of kernels that a GPU runs for a foreach operator."""

    @property
    def laid_out(self) -> bool:
        """True if tensor cores need another memory format; depthwise convolutions do not use them."""
        return not self.channels_last and self.smallest_channels != 1

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


def work(op: Op, values: Mapping[int, Value]) -> OperatorWork:
    """Return the arithmetic and memory traffic of `op`; `values` has its inputs and outputs."""
    inputs = [values[number] for number in dict.fromkeys(_read_values(op))]
    outputs = [values[number] for number in op.made()]
    given = {values[number].storage for number in op.inputs()}
    dtype = _arithmetic_dtype(inputs or outputs)
    known = op_info(op.target)
    if known.adds and len(inputs) > 1:  # factors of half precision may add to float32
        dtype = _arithmetic_dtype([values[number] for number in op.inputs()[1:]])
    if known.view and all(output.storage in given for output in outputs):
        return OperatorWork("view", name_of(op.target), dtype)
    read = sum(_distinct_bytes(value) for value in inputs)
    updated = outputs
    if not outputs:  # in-place foreach operators update their first argument; if fused, all but the gradients
        lists = [arg if isinstance(arg, tuple) else (arg,) for arg in op.args]
        lists = [*lists[:1], *lists[2:]] if "._fused_" in op.target else lists[:1]
        updated = [values[each] for each in {item.value for arg in lists for item in arg if isinstance(item, Ref)}]
    written = sum(_distinct_bytes(value) for value in updated)
    elements = _elements(op, known, inputs, outputs)
    tensors, launches = tensors_and_kernels(op, values)
    matrix = known.kind in ("matmul", "conv", "conv_backward")
    done = OperatorWork(
        kind=known.kind,
        name=name_of(op.target).removeprefix("_foreach_"),
        dtype=dtype,
        read_bytes=read,
        written_bytes=written,
        fresh_bytes=sum(output.nbytes for output in outputs if output.storage not in given),
        results=max((value.numel for value in outputs), default=0) if matrix else elements,
        elements=elements,
        tensors=tensors,
        launches=launches,
    )
    return _with_arithmetic(done, known, op, values, outputs)


def _with_arithmetic(
    done: OperatorWork, known: OpInfo, op: Op, values: Mapping[int, Value], outputs: list[Value]
) -> OperatorWork:
    """Return `done` with the arithmetic of its kind, and with bytes corrected for data skipped or passed over twice."""
    name = name_of(op.target)
    match known.kind:
        case "matmul":
            return _with_long_sums(_matmul(done, op, values, outputs))
        case "conv":
            done = replace(done, flops=_convolution_flops(op, values, outputs))
            return _with_long_sums(_with_channels(done, op, values, 0, outputs))
        case "conv_backward":
            flops = _convolution_backward_flops(op, values)
            gradient = _tensor_arg(op, values, 0)
            done = _with_channels(replace(done, flops=flops), op, values, 1, [] if gradient is None else [gradient])
            return _with_long_sums(done, products=2)
        case "batch_norm":
            backward = name.endswith("_backward")
            done = replace(done, channels_last=_is_channels_last(_tensor_arg(op, values, 1 if backward else 0)))
        case "attention" | "attention_backward":
            return _attention(done, op, values)
        case "none":
            return OperatorWork("none", name, done.dtype, fresh_bytes=done.fresh_bytes)
        case "copy":
            done = replace(done, kind=_copy_kind(op, values))
            return _of_a_view(done, op, values, outputs) if outputs and _copies_a_view(name) else done
        case "transcendental" if name == "pow" and op.args[1] in _EASY_POWERS:
            return replace(done, kind="pointwise", name="square", flops=3 * done.elements)
    read, written = _passes(op, values, known, done)
    return replace(done, flops=known.per_element * done.elements, read_bytes=read, written_bytes=written)


def _elements(op: Op, known: OpInfo, inputs: list[Value], outputs: list[Value]) -> int:
    """Return the number of elements that an operator processes; for a pooling forward, outputs times window size."""
    elements = max((value.numel for value in (*outputs, *inputs)), default=0)
    if is_on_lists(op.target):
        return sum(value.numel for value in (outputs or inputs))
    if not outputs:
        return sum(value.numel for value in inputs)
    if known.kind == "pool" and len(op.args) > 1 and isinstance(op.args[1], tuple):
        window = prod(size for size in op.args[1] if isinstance(size, int))
        return max(elements, outputs[0].numel * window)
    return elements


def _copy_kind(op: Op, values: Mapping[int, Value]) -> str:
    """Return the kind of a copy.

    "strided_copy" if the innermost dimension changes; "permuted_copy" if only the order of outer dimensions changes;
    else "copy".
    """
    touched = [values[number] for number in (*_read_values(op), *op.made())]
    if not touched:
        return "copy"
    innermost = {v.stride[-1] != 1 for v in touched if v.shape and v.shape[-1] > 1 and v.stride[-1] != 0}
    if len(innermost) > 1:
        return "strided_copy"
    *sources, result = touched
    for source in sources:
        if len(source.shape) != len(result.shape):
            continue
        # the order of dimensions in memory, without those of size 1 or stride 0
        pairs = [
            steps
            for *steps, size in zip(source.stride, result.stride, source.shape, strict=True)
            if size > 1 and 0 not in steps
        ]
        if sorted(pairs, key=lambda steps: -steps[0]) != sorted(pairs, key=lambda steps: -steps[1]):
            return "permuted_copy"
    return "copy"


def _copies_a_view(name: str) -> bool:
    """Return True for a copy of a view (`slice_copy`), and for a pad, which may be negative."""
    return name == "constant_pad_nd" or (name.endswith("_copy") and op_info(f"aten.{name[:-5]}.default").view)


def _of_a_view(done: OperatorWork, op: Op, values: Mapping[int, Value], outputs: list[Value]) -> OperatorWork:
    """Return `done` with the elements of the outputs only: the rest of the input is not read."""
    source, made = values[op.inputs()[0]], sum(value.numel for value in outputs)
    read = min(done.read_bytes, made * ITEM_SIZE[source.dtype])
    return replace(done, read_bytes=read, elements=made, results=made)


def _read_values(op: Op) -> tuple[int, ...]:
    """List the values whose elements a call reads, without `out=` arguments and overwritten tensors."""
    overwrites = op_info(op.target).overwrites and op.target.split(".")[1].endswith("_")
    kwargs = tuple((name, arg) for name, arg in op.kwargs if name not in _DESTINATIONS)
    return replace(op, args=op.args[1:] if overwrites else op.args, kwargs=kwargs).inputs()


def _distinct_bytes(value: Value) -> int:
    """Return the bytes of a value's distinct elements: expanded dimensions count once."""
    sizes = (size for size, step in zip(value.shape, value.stride, strict=True) if step != 0 or size == 0)
    return prod(sizes) * ITEM_SIZE[value.dtype]


def _arithmetic_dtype(values: list[Value]) -> str:
    """Return the dtype of the arithmetic: the widest floating-point dtype among `values`, else the first dtype."""
    floating = [value.dtype for value in values if value.dtype.startswith(("float", "bfloat", "complex"))]
    if floating:
        return max(floating, key=lambda dtype: (ITEM_SIZE[dtype], dtype))
    return values[0].dtype if values else "float32"


def _tensor_arg(op: Op, values: Mapping[int, Value], position: int) -> Value | None:
    arg = op.args[position] if position < len(op.args) else None
    return values[arg.value] if isinstance(arg, Ref) else None


def _matmul(done: OperatorWork, op: Op, values: Mapping[int, Value], outputs: list[Value]) -> OperatorWork:
    """Return `done` with a matrix product's arithmetic: 2 m n k, times the batch size."""
    info = op_info(op.target)
    left, right = (_tensor_arg(op, values, info.adds + factor) for factor in range(2))
    if left is None or right is None or not outputs:
        return done
    if info.product:
        sizes = dict(zip((*info.product[0], *info.product[1]), (*left.shape, *right.shape), strict=False))
        return replace(done, flops=2 * prod(sizes.values()), smallest_dimension=min(sizes.get(d, 1) for d in "mkn"))
    inner = left.shape[-1] if left.shape else 1
    rows = left.shape[-2] if len(left.shape) > 1 else 1
    columns = outputs[0].shape[-1] if len(outputs[0].shape) > 1 else 1
    return replace(done, flops=2 * inner * outputs[0].numel, smallest_dimension=min(rows, columns, inner))


def _with_long_sums(done: OperatorWork, products: int = 1) -> OperatorWork:
    return replace(done, results=max(done.results, done.flops // (2 * products * INNER_DEPTH)))


def _with_channels(
    done: OperatorWork, op: Op, values: Mapping[int, Value], first: int, made: list[Value]
) -> OperatorWork:
    """Return `done` with a convolution's memory format and channels per group; `first` is the index of the image
    argument."""
    image, weight = _tensor_arg(op, values, first), _tensor_arg(op, values, first + 1)
    if image is None or weight is None or weight.numel == 0 or not made or len(made[0].shape) < 2:
        return done
    position = 8 + first
    groups = op.args[position] if position < len(op.args) else 1
    channels = made[0].shape[1] // (groups if isinstance(groups, int) and groups > 0 else 1)
    smallest = min(channels, weight.numel // weight.shape[0])
    return replace(done, smallest_channels=smallest, channels_last=_is_channels_last(image))


def _is_channels_last(image: Value | None) -> bool:
    return image is not None and len(image.shape) == 4 and image.stride[1] == 1 and image.shape[1] > 1


def _convolution_flops(op: Op, values: Mapping[int, Value], outputs: list[Value]) -> int:
    """Return a convolution's arithmetic: each output element (transposed: input element) sums in_channels / groups x
    kernel size products."""
    image, weight = _tensor_arg(op, values, 0), _tensor_arg(op, values, 1)
    if image is None or weight is None or weight.numel == 0 or not outputs:
        return 0
    transposed = name_of(op.target).endswith("convolution") and len(op.args) > 6 and op.args[6] is True
    driver = image if transposed or "transpose" in op.target else outputs[0]
    return 2 * driver.numel * (weight.numel // weight.shape[0])


def _convolution_backward_flops(op: Op, values: Mapping[int, Value]) -> int:
    """Return the forward's arithmetic once per requested gradient of input and weight, plus the sum for the bias."""
    gradient, image, weight = (_tensor_arg(op, values, position) for position in range(3))
    mask = op.args[-1]
    if gradient is None or image is None or weight is None or not isinstance(mask, tuple):
        return 0
    driver = image if op.args[7] is True else gradient
    products = 2 * driver.numel * (weight.numel // max(1, weight.shape[0]))
    large = sum(1 for wanted in mask[:2] if wanted)
    return products * large + (gradient.numel if mask[2] else 0)


def _attention(done: OperatorWork, op: Op, values: Mapping[int, Value]) -> OperatorWork:
    """Return `done` with attention's arithmetic: two products forward, five backward; half if causal."""
    first = 1 if done.kind == "attention_backward" else 0
    query, key, value = (_tensor_arg(op, values, first + step) for step in range(3))
    if query is None or key is None or value is None:
        return done
    scores = prod(query.shape[:-1]) * key.shape[-2]
    flops = 2 * scores * (query.shape[-1] + value.shape[-1])
    if first:
        flops = flops * 5 // 2
    kernel = op_info(op.target).attention
    position = len(op.args) if kernel is None else kernel.causal
    causal = dict(op.kwargs).get("is_causal", op.args[position] if position < len(op.args) else False)
    half = 2 if causal is True else 1
    return replace(done, flops=flops // half, elements=scores // half, results=query.numel)


def _passes(op: Op, values: Mapping[int, Value], known: OpInfo, done: OperatorWork) -> tuple[int, int]:
    """Return the bytes read and written, corrected for data that the algorithm skips or passes over twice."""
    read, written = done.read_bytes, done.written_bytes
    outputs = sum(values[number].nbytes for number in op.made())
    name = name_of(op.target)
    match known.kind:
        case "batch_norm":  # one pass for the statistics, one to normalize
            return 2 * read, written
        case "gather" if name.startswith("nll_loss"):  # one element and one target per row
            scores, target = _tensor_arg(op, values, 0), _tensor_arg(op, values, 1)
            if scores is None or target is None:
                return 0, written
            return target.nbytes + target.numel * ITEM_SIZE[scores.dtype], written
        case "gather":
            indices = sum(v.nbytes for v in map(values.__getitem__, op.inputs()) if v.dtype.startswith("int"))
            return indices + outputs, written
        case "fill":
            return 0, written
        case "scatter" if name == "embedding_dense_backward":  # zeroed, then read and accumulated by row
            gradient = values[op.inputs()[0]].nbytes
            return read + gradient, written + gradient
        case "scatter" if op.target.split(".")[1].endswith("_"):
            touched = sum(values[number].nbytes for number in op.inputs()[1:])
            return 2 * touched, touched
        case _:
            return read, written
