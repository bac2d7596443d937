"""Plans that networks carry: how tensor parallelism cuts their layers, and where pipelines cut them into stages.

A plan is a dictionary from patterns of paths, in which "*" stands for one name, to what happens there. It is an
attribute of the network or of a part of it, whose paths it then takes; Hugging Face's configurations have it, too:

    tp_plan, _tp_plan, config.base_model_tp_plan    "layers.*.mlp.up_proj": "colwise", or a style of torch, as
                                                    `parallelize_module` takes it: `ColwiseParallel()`
    sp_plan                                         what is added where the sequence is cut between those layers
    pp_plan, _pp_plan, config.base_model_pp_plan    "layers": (["hidden_states"], ["hidden_states"]), what a part takes
                                                    and gives
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def plan_of(net: nn.Module, name: str) -> dict[str, Any]:
    """Return what a network's plan ("tp_plan", "sp_plan", "pp_plan") says, by path of a module or parameter.

    The plan of the whole comes before those of its parts.
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
