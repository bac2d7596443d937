"""The backend that `torch.compile(model, backend="magis")` finds by its entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo import disable
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from magis.compile.options import OptionError, Options, as_options
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
    function that is given a `Report` of each graph; `inductor`: its code, which saves what the plan
    saves. UsageError, one line, for anything else; there are no modes.
    """
    if mode not in (None, "default"):
        raise OptionError(f"backend magis has no mode {mode!r}", hint="leave it out")
    found = as_options(options)
    compile_ = partial(_by_inductor, options=found) if found.inductor else partial(_as_planned, options=found)
    if is_open(example_inputs):
        return disable(Specialized(gm, compile_), reason="plans for shapes are made outside of dynamo")  # type: ignore[no-any-return]
    return compile_(gm, example_inputs)


def _as_planned(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Options) -> Callable[..., Any]:
    """By way of AOTAutograd; a new one each time, since it changes what it was made with."""
    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=boxed_nop, partition_fn=partial(partition, options=options), keep_inference_input_mutations=True
    )(gm, inputs)
    return compiled


def _by_inductor(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Options) -> Callable[..., Any]:
    from magis.compile.saved import by_inductor  # inductor loads for seconds

    return by_inductor(gm, inputs, options=options)
