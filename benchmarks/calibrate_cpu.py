"""Times real operators on the CPU and sets them beside the constants of the device "cpu".

    python benchmarks/calibrate_cpu.py [--seconds 0.1] [--only pattern] [--threads 2]

One line per operator: kind, measured microseconds, the model's, their ratio; at the end the spread of the
ratio by kind. The constants in `magis/cost/devices.py` were fitted to this table once and are frozen: the
program prints, it changes nothing. Arguments rotate through 64 MiB of copies, so that they come from where
they come from in a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import torch
from lib.program import arguments

from magis.cost.devices import find_device
from magis.cost.flops import work
from magis.cost.operator_latency import roofline_ns
from magis.cost.signature import parse
from magis.graph.nodes import Op, Value
from magis.ops.call import outputs, resolve, to_torch
from magis.runtime.scratch import make_tensors

ROTATED_BYTES = 64 << 20


def tensor(*shape: int, dtype: str = "float32") -> str:
    """A contiguous tensor as signatures write it."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return f"{dtype}[{','.join(map(str, shape))}]{{{','.join(map(str, strides))}}}"


def products() -> Iterator[str]:
    """Matrix products and attention."""
    for m, k, n in (
        (64, 64, 64), (256, 256, 256), (512, 256, 1024), (1024, 1024, 1024), (512, 768, 768), (2048, 128, 128),
    ):  # fmt: skip
        yield f"aten.mm.default({tensor(m, k)}, {tensor(k, n)})"
        yield f"aten.addmm.default({tensor(n)}, {tensor(m, k)}, float32[{k},{n}]{{1,{k}}})"
        yield f"aten.mm.default(float32[{m},{k}]{{1,{m}}}, {tensor(k, n)})"
    for b, m, k, n in ((32, 128, 64, 128), (32, 128, 128, 64), (64, 64, 32, 64)):
        yield f"aten.bmm.default({tensor(b, m, k)}, {tensor(b, k, n)})"
        yield f"aten.bmm.default({tensor(b, m, k)}, float32[{b},{k},{n}]{{{k * n},1,{k}}})"
    for b, h, s, d in ((4, 4, 128, 64), (8, 8, 64, 32), (2, 8, 256, 64)):
        q = f"float32[{b},{h},{s},{d}]{{{s * h * d},{d},{h * d},1}}"
        rows = f"float32[{b},{h},{s}]{{{h * s},1,{h}}}"
        name = "aten._scaled_dot_product_flash_attention_for_cpu"
        yield f"{name}.default({q}, {q}, {q})"
        yield f"{name}_backward.default({q}, {q}, {q}, {q}, {q}, {rows}, 0.0, False)"


def convolutions() -> Iterator[str]:
    """Convolutions, forward and backward, one of them depthwise."""
    for n, c_in, size, c_out, k, stride, pad, groups in (
        (4, 64, 56, 64, 3, 1, 1, 1), (4, 64, 28, 128, 3, 2, 1, 1), (4, 128, 28, 128, 1, 1, 0, 1),
        (4, 3, 64, 64, 7, 2, 3, 1), (2, 32, 64, 32, 3, 1, 1, 1), (8, 256, 14, 256, 3, 1, 1, 1),
        (4, 256, 14, 64, 1, 1, 0, 1), (2, 16, 128, 16, 3, 1, 1, 1), (8, 64, 28, 64, 3, 1, 1, 64),
    ):  # fmt: skip
        out = (size + 2 * pad - k) // stride + 1
        image, weight = tensor(n, c_in, size, size), tensor(c_out, c_in // groups, k, k)
        rest = f"[{stride}, {stride}], [{pad}, {pad}], [1, 1], False, [0, 0], {groups}"
        yield f"aten.convolution.default({image}, {weight}, None, {rest})"
        gradient = tensor(n, c_out, out, out)
        mask = "[True, True, False]"
        yield f"aten.convolution_backward.default({gradient}, {image}, {weight}, [0], {rest}, {mask})"
        if c_in == 3:  # the image itself wants no gradient
            mask = "[False, True, False]"
            yield f"aten.convolution_backward.default({gradient}, {image}, {weight}, [0], {rest}, {mask})"


def elementwise() -> Iterator[str]:
    """One result per element."""
    for shape in ((64, 256), (8, 128, 256), (8, 128, 1024), (4, 64, 56, 56)):
        t = tensor(*shape)
        for name in ("relu", "gelu", "exp", "tanh", "sigmoid", "sqrt", "silu", "erf", "log", "cos", "neg", "rsqrt"):
            yield f"aten.{name}.default({t})"
        for name in ("add.Tensor", "mul.Tensor", "div.Tensor", "add_.Tensor", "maximum.default", "lt.Tensor"):
            yield f"aten.{name}({t}, {t})"
        for name in ("gelu_backward.default", "silu_backward.default", "tanh_backward.default"):
            yield f"aten.{name}({t}, {t})"
        yield f"aten.threshold_backward.default({t}, {t}, 0)"
        yield f"aten.addcdiv_.default({t}, {t}, {t}, value=0.1)"
        yield f"aten.lerp_.Scalar({t}, {t}, 0.1)"
        yield f"aten.where.self({tensor(*shape, dtype='bool')}, {t}, {t})"
        yield f"aten.pow.Tensor_Scalar({t}, 3)"
        yield f"aten.pow.Tensor_Scalar({t}, 2.5)"
        yield f"aten.native_dropout.default({t}, 0.1, True)"
        yield f"aten.bernoulli_.float({t}, 0.1)"
        yield f"aten.clone.default({t})"
        yield f"aten.fill_.Scalar({t}, 0)"
        yield f"aten.cat.default([{t}, {t}], 1)"
        yield f"aten._to_copy.default({t}, dtype=dtype:bfloat16)"
        steps = "float32[]{}"
        numbers = "lr=0.001, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-08, amsgrad=False, maximize=False"
        yield f"aten._fused_adamw_.default([{t}], [{t}], [{t}], [{t}], [], [{steps}], {numbers})"
        yield f"aten.masked_fill.Scalar({t}, {tensor(*shape, dtype='bool')}, 0.0)"


def rows() -> Iterator[str]:
    """Sums and normalizations of rows, lookups, permuted copies, losses."""
    for shape in ((64, 256), (8, 128, 256), (8, 128, 1024), (16, 128, 128)):
        t, n = tensor(*shape), shape[-1]
        w, stats = tensor(n), tensor(*shape[:-1], 1)
        yield f"aten.sum.dim_IntList({t}, [0], True)"
        yield f"aten.mean.dim({t}, [-1], True)"
        yield f"aten.sum.default({t})"
        yield f"aten.var_mean.correction({t}, [-1], correction=0, keepdim=True)"
        yield f"aten._softmax.default({t}, -1, False)"
        yield f"aten._log_softmax.default({t}, -1, False)"
        yield f"aten._softmax_backward_data.default({t}, {t}, -1, dtype:float32)"
        yield f"aten._log_softmax_backward_data.default({t}, {t}, -1, dtype:float32)"
        yield f"aten.native_layer_norm.default({t}, [{n}], {w}, {w}, 1e-05)"
        mask = "[True, True, True]"
        yield f"aten.native_layer_norm_backward.default({t}, {t}, [{n}], {stats}, {stats}, {w}, {w}, {mask})"
        index = tensor(*shape[:-1], dtype="int64")
        yield f"aten.embedding.default({tensor(1000, n)}, {index})"
        yield f"aten.embedding_dense_backward.default({t}, {index}, 1000, -1, False)"
        if len(shape) == 3:
            b, s, _ = shape
            form = "memory_format=memory_format:contiguous_format"
            yield f"aten.clone.default(float32[{b},{s},{n}]{{{n * s},1,{s}}}, {form})"
            yield f"aten.clone.default(float32[{b},4,{s},{n // 4}]{{{n * s},{n // 4},{n},1}}, {form})"
    for count, classes in ((512, 2000), (64, 100)):
        scores, target = tensor(count, classes), tensor(count, dtype="int64")
        yield f"aten.nll_loss_forward.default({scores}, {target}, None, 1, -100)"
        tail = "None, 1, -100, float32[]{}"
        yield f"aten.nll_loss_backward.default(float32[]{{}}, {scores}, {target}, {tail})"


def images() -> Iterator[str]:
    """What convolution networks do besides convolving."""
    for shape in ((4, 64, 56, 56), (8, 256, 14, 14), (2, 32, 64, 64)):
        t, w = tensor(*shape), tensor(shape[1])
        n, c, h, _ = shape
        half, double = tensor(n, c, h // 2, h // 2), tensor(n, c, 2 * h, 2 * h)
        yield f"aten.native_batch_norm.default({t}, {w}, {w}, {w}, {w}, True, 0.1, 1e-05)"
        mask = "[True, True, True]"
        yield f"aten.native_batch_norm_backward.default({t}, {t}, {w}, {w}, {w}, {w}, {w}, True, 1e-05, {mask})"
        window = "[2, 2], [2, 2], [0, 0]"
        yield f"aten.max_pool2d_with_indices.default({t}, {window}, [1, 1], False)"
        index = tensor(n, c, h // 2, h // 2, dtype="int64")
        yield (f"aten.max_pool2d_with_indices_backward.default({half}, {t}, {window}, [1, 1], False, {index})")
        yield f"aten.avg_pool2d.default({t}, [2, 2], [2, 2])"
        yield f"aten.avg_pool2d_backward.default({half}, {t}, {window}, False, True, None)"
        size, again = f"[{n}, {c}, {h}, {h}]", f"[{2 * h}, {2 * h}]"
        yield f"aten.upsample_nearest2d.default({t}, {again})"
        yield f"aten.upsample_nearest2d_backward.default({double}, {again}, {size})"
        yield f"aten.upsample_bilinear2d.default({t}, {again}, True)"
        yield f"aten.upsample_bilinear2d_backward.default({double}, {again}, {size}, True)"
        yield f"aten.mean.dim({t}, [-1, -2], True)"
        yield f"aten.sum.dim_IntList({t}, [0, 2, 3])"
        yield f"aten.slice_backward.default({half}, {size}, 2, 0, {h // 2}, 1)".replace(half, tensor(n, c, h // 2, h))


def small() -> Iterator[str]:
    """What costs the host more than the device."""
    square = tensor(64, 64)
    yield f"aten.view.default({square}, [4096])"
    yield f"aten.t.default({square})"
    yield f"aten.slice.Tensor({square}, 0, 0, 10)"
    yield f"aten.empty_like.default({square})"
    yield f"aten.add.Tensor({tensor(4)}, {tensor(4)})"
    yield f"aten.zeros_like.default({square})"


def timed(key: str, seconds: float) -> tuple[Op, dict[int, Value], float]:
    """The operator with its outputs, the values, and the lower quartile of its time in nanoseconds."""
    op, values = parse(key)
    scalars = dict.fromkeys(op.scalars(), 1.0)
    first = make_tensors(op, values)
    size = sum(given.untyped_storage().nbytes() for given in first.values())
    copies = max(1, min(48, ROTATED_BYTES // max(1, size)))
    sets = [first, *(make_tensors(op, values) for _ in range(copies - 1))]
    function: Callable[..., object] = resolve(op.target)
    calls = cycle(
        [
            (
                [to_torch(arg, given, scalars) for arg in op.args],
                {name: to_torch(arg, given, scalars) for name, arg in op.kwargs},
            )
            for given in sets
        ]
    )
    result: object = None
    for _ in range(3):
        args, kwargs = next(calls)
        result = function(*args, **kwargs)
    start = time.perf_counter()
    args, kwargs = next(calls)
    result = function(*args, **kwargs)
    repeats = max(1, min(50, int(0.002 / max(time.perf_counter() - start, 1e-6))))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 5:
        begin = time.perf_counter_ns()
        for _ in range(repeats):
            args, kwargs = next(calls)
            result = function(*args, **kwargs)
        samples.append((time.perf_counter_ns() - begin) / repeats)
    return *with_outputs(op, values, sets, result), statistics.quantiles(samples, n=4)[0]


def with_outputs(
    op: Op, values: dict[int, Value], sets: list[dict[int, torch.Tensor]], result: object
) -> tuple[Op, dict[int, Value]]:
    """The operator with the outputs that it returned; those on an argument's storage say so."""
    shared = {
        given.untyped_storage().data_ptr(): values[number].storage
        for tensors in sets
        for number, given in tensors.items()
    }
    made: list[int | None] = []
    for found in outputs(result):
        if found is None:
            made.append(None)
            continue
        number = 1000 + len(made)
        storage = shared.get(found.untyped_storage().data_ptr(), number)
        dtype = str(found.dtype).removeprefix("torch.")
        values[number] = Value(number, tuple(found.shape), tuple(found.stride()), dtype, storage)
        made.append(number)
    return replace(op, outputs=tuple(made)), values


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, threads=2)
    parser.add_argument("--seconds", type=float, default=0.1, help="per operator")
    parser.add_argument("--only", default="", help="a part of the signature")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gc.disable()
    torch.empty(31 << 20, dtype=torch.uint8)  # its release makes glibc keep smaller blocks instead of unmapping
    device = find_device("cpu")
    ratios: dict[str, list[float]] = defaultdict(list)
    families = (products, convolutions, elementwise, rows, images, small)
    with torch.no_grad():
        for key in (key for make in families for key in make() if options.only in key):
            op, values, measured = timed(key, options.seconds)
            predicted = roofline_ns(device, op, values)
            kind = work(op, values).kind
            ratios[kind].append(predicted / measured)
            print(
                f"{kind:18} {measured / 1e3:9.1f} us  model {predicted / 1e3:9.1f} us"
                f"  x{predicted / measured:5.2f}  {key[:100]}"
            )
    print(f"\n{'kind':18} cases  model / measured: lowest, median, highest")
    for kind, found in sorted(ratios.items()):
        print(f"{kind:18} {len(found):5}  {min(found):5.2f} {statistics.median(found):5.2f} {max(found):5.2f}")


if __name__ == "__main__":
    main()
