"""Workspace of operators where it cannot be measured: documented estimates, bytes beyond the fresh outputs.

GPU (assumptions, not measurements):

* Matrix products take none of their own: cuBLAS's workspace (8 MiB; 32 MiB on Hopper) is allocated once per
  process and lives on, under the original step and the optimized one alike.
* Convolutions run as implicit products without scratch, but for half-precision weight gradients, which are
  summed in float32 first.
* Attention's backward pass keeps one float32 number per row, and sums half-precision query gradients in
  float32.
* LayerNorm's backward pass keeps partial weight gradients, one float32 row per 64 rows of the input and
  weight.
* Embedding's backward pass sorts its indices: four copies of them.
* Everything else takes none.

CPU (as oneDNN and ATen behaved under torch 2.13; measured workspaces replace these wherever a step really
runs):

* Convolutions copy their weight and one activation tensor into blocked layouts; the backward pass both of
  them.
* Dropout draws its mask in float32; LayerNorm's backward pass keeps two float32 rows per thread (two
  threads).
* Attention keeps a block of scores per thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from magis.aten.states import STATE_BYTES
from magis.cost.families import family, name_of
from magis.ir.types import Op, Ref, Value

__all__ = ["estimated_workspace"]

_THREADS = 2
_HALF = ("float16", "bfloat16")


def estimated_workspace(op: Op, values: Mapping[int, Value], *, gpu: bool) -> int:
    """Estimated workspace of one call in bytes; 0 for operators that the module's head does not name."""
    if op.target in ("magis.rng_save", "magis.rng_enter"):  # torch hands the state out as a tensor of the host
        return 0 if gpu else STATE_BYTES["cpu"]
    known = family(op.target)
    inputs = [values[number] for number in op.inputs()]
    if known is None or not inputs:
        return 0
    name = name_of(op.target)
    outputs = [values[number] for number in op.made()]
    return _on_gpu(op, name, known.kind, inputs) if gpu else _on_cpu(op, name, known.kind, inputs, outputs)


def _on_gpu(op: Op, name: str, kind: str, inputs: list[Value]) -> int:
    half = inputs[0].dtype in _HALF
    match kind:
        case "conv_backward":
            mask = op.args[-1]
            wanted = isinstance(mask, tuple) and len(mask) == 3 and mask[1] is True
            return 4 * inputs[2].numel if half and wanted else 0
        case "attention_backward":
            query = inputs[1]
            return 4 * prod(query.shape[:-1]) + (4 * query.numel if half else 0)
        case "norm" if name.endswith("_backward"):
            features = _features(op, inputs[1])
            rows = inputs[1].numel // max(1, features)
            return 2 * 4 * features * -(-rows // 64)
        case "scatter" if name == "embedding_dense_backward":
            return 4 * inputs[1].nbytes
        case _:
            return 0


def _on_cpu(op: Op, name: str, kind: str, inputs: list[Value], outputs: list[Value]) -> int:
    match kind:
        case "conv":
            return inputs[1].nbytes + (outputs[0].nbytes if outputs else inputs[0].nbytes)
        case "conv_backward":
            return inputs[0].nbytes + inputs[1].nbytes + inputs[2].nbytes
        case "random" if name == "native_dropout":
            return 4 * inputs[0].numel
        case "norm" if name.endswith("_backward"):
            return 2 * 4 * _THREADS * _features(op, inputs[1])
        case "attention" | "attention_backward":
            query = inputs[1 if kind == "attention_backward" else 0]
            return 4 * _THREADS * min(query.shape[-2], 64) * (512 + query.shape[-1])
        case _:
            return 0


def _features(op: Op, image: Value) -> int:
    """Elements of one normalized row: the product of the shape that LayerNorm names, else of the channels."""
    for arg in op.args:
        if isinstance(arg, tuple) and arg and all(isinstance(item, int) for item in arg):
            return prod(item for item in arg if isinstance(item, int))
        if isinstance(arg, Ref):
            continue
    return image.shape[1] if len(image.shape) > 1 else 1
