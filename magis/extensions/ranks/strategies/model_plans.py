"""Parallelism plans that networks carry: for tensor parallelism, sequence parallelism, and pipeline stages.

A plan is a dictionary from patterns of paths, in which "*" matches one name, to a style. It is an attribute of the
network or of a sub-module, with paths relative to its owner, or of a Hugging Face configuration:

    tp_plan, _tp_plan, config.base_model_tp_plan    "layers.*.mlp.up_proj": "colwise", or a style of torch, as
                                                    `parallelize_module` takes it: `ColwiseParallel()`
    sp_plan                                         styles for layers between which the sequence is cut
    pp_plan, _pp_plan, config.base_model_pp_plan    "layers": (["hidden_states"], ["hidden_states"]), the inputs and
                                                    outputs of a sub-module
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def plan_of(net: nn.Module, name: str) -> dict[str, Any]:
    """Return a network's plan ("tp_plan", "sp_plan" or "pp_plan") by path of module or parameter.

    Entries of the whole network take precedence over those of sub-modules.
    """
    places = [path for path, _ in net.named_modules()]
    places += [path for path, _ in net.named_parameters(remove_duplicate=False)]
    found: dict[str, Any] = {}
    for prefix, part in net.named_modules():
        config = getattr(part, "config", None)
        own = (
            getattr(part, name, None) or getattr(part, f"_{name}", None) or getattr(config, f"base_model_{name}", None)
        )
        if not isinstance(own, dict):
            continue
        below = [path for path in places if not prefix or path.startswith(f"{prefix}.")]
        for pattern, said in own.items():
            whole = f"{prefix}.{pattern}" if prefix else pattern
            for path in below:
                # name by name, since "*" matches no dot
                if path.count(".") == whole.count(".") and all(map(fnmatchcase, path.split("."), whole.split("."))):
                    found.setdefault(path, said)
    return found


def written_in_stages(net: nn.Module) -> bool:
    """Return True if a network has `start`, `block` and `finish`, which its forward calls one after another."""
    return all(hasattr(type(net), name) for name in ("start", "block", "finish"))
