"""Which calls draw random numbers: by operators' tags, checked against what the generator does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from magis.capture.schemas import draws
from tests.randomness.nets import DRAWS, WIDTH


def _overloads() -> Iterator[OpOverload]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if isinstance(found, OpOverload):
                yield found


def test_every_operator_with_a_generator_or_the_tag_draws() -> None:
    """Their defaults count where a call leaves a probability of dropout out; that is 0 for attention."""
    found = set()
    for overload in _overloads():
        takes = "Generator?" in str(overload._schema)
        if takes or torch.Tag.nondeterministic_seeded in overload.tags:
            found.add(str(overload))
            required = [None if "float" not in str(a.type) else 0.5 for a in overload._schema.arguments]
            name = overload._schema.name
            assert draws(overload, tuple(required), {}) == (not name.endswith("_backward")), name
    assert len(found) > 100
    assert {"aten.random_.from", "aten.binomial.default", "aten._sample_dirichlet.default"} <= found


class _Watched(TorchDispatchMode):
    """Holds what every call says against what it does to the generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.said: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = torch.default_generator.get_state()
        result = func(*args, **(kwargs or {}))
        moved = not torch.equal(before, torch.default_generator.get_state())
        self.said.append(draws(func, args, kwargs or {}))
        assert self.said[-1] or not moved, func
        return result


@pytest.mark.parametrize("name", DRAWS)
def test_a_call_that_moves_the_generator_is_told(name: str) -> None:
    x = torch.randn(8, WIDTH)
    with torch.no_grad(), _Watched() as watched:
        DRAWS[name](x)
    assert any(watched.said)
