"""The backend that `torch.compile(model, backend="magis")` finds by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from magis.compile.options import OptionError, as_options
from magis.compile.partition import partition
from magis.compile.shapes import Specialized, is_open

__all__ = ["magis"]


def magis(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one graph of dynamo: PyTorch's own kernels, in an order and with recomputation that need less memory.

    `options`: one of `memory_ratio` (share of the unplanned peak of forward and backward; default 0.8),
    `memory_limit` (bytes, or "8 GiB") and `latency_ratio`; `budget` (plans) and `seconds` of each search; `report`, a
    function that is given a `Report` of each graph. UsageError, one line, for anything else; there are no modes.
    """
    if mode not in (None, "default"):
        raise OptionError(f"backend magis has no mode {mode!r}", hint="leave it out")
    compile_ = partial(_compiled, partition_fn=partial(partition, options=as_options(options)))
    if is_open(example_inputs):
        return disable(Specialized(gm, compile_), reason="plans for shapes are made outside of dynamo")  # type: ignore[no-any-return]
    return compile_(gm, example_inputs)


def _compiled(gm: fx.GraphModule, inputs: Sequence[Any], *, partition_fn: Callable[..., Any]) -> Callable[..., Any]:
    """By way of AOTAutograd; a new one each time, since it changes what it was made with."""
    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, partition_fn=partition_fn, keep_inference_input_mutations=True
    )(gm, inputs)
    return compiled
