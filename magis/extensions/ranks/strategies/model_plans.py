"""Parallelism plans that networks carry: for tensor parallelism, sequence parallelism, and pipeline stages.

A plan is a dictionary from patterns of paths, in which "*" matches one name, to a style. It is an attribute of the
network or of a sub-module, with paths relative to its owner, or of a Hugging Face configuration:

    tp_plan, _tp_plan, config.base_model_tp_plan    "layers.*.mlp.up_proj": "colwise", or a style of torch, as
                                                    `parallelize_module` takes it: `ColwiseParallel()`
    sp_plan                                         what is added where the sequence is cut between those layers
    pp_plan, _pp_plan, config.base_model_pp_plan    "layers": (["hidden_states"], ["hidden_states"]), what a part takes
                                                    and gives

In an attribute without an underscore, which a network's author wrote for it, every pattern must match something.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from magis.errors import UsageError
from magis.strategies.distributed_names import carried_plan


def plan_of(net: nn.Module, name: str) -> dict[str, Any]:
    """Return a network's plan ("tp_plan", "sp_plan" or "pp_plan") by path of module or parameter.

    The plan of the whole comes before those of its parts. Raises UsageError for a plan that is not written as the top
    of this file says.
    """
    places = [path for path, _ in net.named_modules()]
    places += [path for path, _ in net.named_parameters(remove_duplicate=False)]
    found: dict[str, Any] = {}
    for prefix, part in net.named_modules():
        own = carried_plan(part, name)
        if not isinstance(own, dict):
            continue
        # Hugging Face's models have properties of these names, whose patterns need not match
        written = getattr(part, name, None) and not isinstance(inspect.getattr_static(part, name, None), property)
        below = [path for path in places if not prefix or path.startswith(f"{prefix}.")]
        for pattern, said in own.items():
            _check_entry(f"the {name} of {type(part).__name__}", name, pattern, said)
            whole = f"{prefix}.{pattern}" if prefix else pattern
            matched = [path for path in below if _matches(path, whole)]
            if written and not matched and not any(_matches(path, whole) for path in _absent(net)):
                raise UsageError(
                    f"the {name} of {type(part).__name__} names {pattern!r}, which it does not have",
                    hint='write a path as in named_modules(), with "*" for any one name in it',
                )
            for path in matched:
                found.setdefault(path, said)
    return found


def _matches(path: str, pattern: str) -> bool:
    """Return True if a path matches name by name, since "*" matches no dot."""
    return path.count(".") == pattern.count(".") and all(map(fnmatchcase, path.split("."), pattern.split(".")))


def _absent(net: nn.Module) -> Iterator[str]:
    """Yield the paths of modules and parameters that a network has as None: left out, or on another stage."""
    for prefix, part in net.named_modules():
        for name, value in (vars(part) | part._parameters | part._modules).items():
            if value is None:
                yield f"{prefix}.{name}" if prefix else name


def _check_entry(whose: str, name: str, pattern: Any, said: Any) -> None:
    """Raise UsageError for an entry of a plan that is not written as the top of this file says."""
    if not isinstance(pattern, str):
        raise UsageError(f"{whose} has the key {pattern!r}", hint="its keys are patterns of paths, in quotation marks")
    if name != "pp_plan":
        return
    pair = said if isinstance(said, (list, tuple)) and len(said) == 2 else ((), ())
    if not all(isinstance(names, (list, tuple)) and names and all(isinstance(n, str) for n in names) for names in pair):
        raise UsageError(
            f"{whose} says {said!r} of {pattern!r}",
            hint='it says what a part takes and gives, such as (["tokens"], ["hidden"])',
        )


def written_in_stages(net: nn.Module, inputs: int) -> bool:
    """Return True if a network has `start(*inputs)`, `block(index, hidden)` and `finish(hidden)`, which its forward
    calls one after another."""
    for name, count in (("start", inputs), ("block", 2), ("finish", 1)):
        method = getattr(type(net), name, None)
        if not inspect.isfunction(method):
            return False
        try:
            inspect.signature(method).bind(net, *range(count))
        except TypeError:
            return False
    return True
