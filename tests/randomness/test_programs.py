"""Random programs of dropout, noise, checkpoints within checkpoints and calls on the generator, against eager mode."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.randomness.nets import DRAWS, WIDTH
from tests.randomness.test_states import agree

PLAIN = ("dropout", "dropout_", "rand_like", "bernoulli p", "rrelu", "normal_", "attention")


@dataclass(frozen=True)
class Part:
    """One thing that a program does; ``parts`` are those within it."""

    kind: str
    what: Any = None
    parts: tuple[Part, ...] = ()


def _around(inner: st.SearchStrategy[tuple[Part, ...]]) -> st.SearchStrategy[tuple[Part, ...]]:
    how = st.fixed_dictionaries({"use_reentrant": st.booleans(), "preserve_rng_state": st.booleans()})
    whole = st.builds(Part, st.just("checkpoint"), how, inner)
    forked = st.builds(Part, st.just("fork"), st.none(), inner)
    again = st.builds(Part, st.just("again"), st.none(), inner)
    return st.lists(st.one_of(whole, whole, forked, again, _LEAF), min_size=1, max_size=3).map(tuple)


_LEAF = st.one_of(
    st.just(Part("linear")),
    st.just(Part("linear")),
    st.builds(Part, st.just("draw"), st.sampled_from(PLAIN)),
    st.builds(Part, st.just("seed"), st.integers(-3, 3)),
    st.builds(Part, st.just("own"), st.booleans()),
)
PROGRAMS = st.recursive(st.lists(_LEAF, min_size=1, max_size=3).map(tuple), _around, max_leaves=6)

RATIOS = st.sampled_from((0.8, 0.9, 0.6))


class Program(nn.Module):
    """Runs the parts one after another; every linear one has a layer of its own."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.layers = nn.ModuleList()
        self._lay(parts)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noise = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def _lay(self, parts: tuple[Part, ...]) -> None:
        for part in parts:
            if part.kind == "linear":
                self.layers.append(nn.Linear(WIDTH, WIDTH))
            self._lay(part.parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self._run(self.parts, torch.tanh(self.first(x)), 0), 0.3))

    def _run(self, parts: tuple[Part, ...], x: Tensor, layer: int) -> Tensor:
        for part in parts:
            x = self._do(part, x, layer)
            layer += _layers(part)
        return x

    def _do(self, part: Part, x: Tensor, layer: int) -> Tensor:
        match part.kind:
            case "linear":
                return torch.tanh(self.layers[layer](x))
            case "draw":
                return DRAWS[part.what](x)
            case "seed":
                torch.manual_seed(part.what)
                return x
            case "own":
                return x * torch.rand(x.shape, generator=self.noise[part.what])
            case "fork":
                with torch.random.fork_rng():
                    return self._run(part.parts, x, layer)
            case "again":
                state = torch.get_rng_state()
                once = self._run(part.parts, x, layer)
                torch.set_rng_state(state)
                return once + self._run(part.parts, x, layer)
            case _:
                found: Tensor = checkpoint(self._run, part.parts, x, layer, **part.what)
                return found


def _layers(part: Part) -> int:
    return (part.kind == "linear") + sum(_layers(each) for each in part.parts)


def _held(parts: tuple[Part, ...], ratio: float) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reentrant checkpoints within reentrant ones
        agree(Program(parts), ratio=ratio)


DROP = Part("draw", "dropout")
KEPT = {"use_reentrant": True, "preserve_rng_state": True}


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, RATIOS)
@example((Part("checkpoint", KEPT, (Part("linear"), DROP, Part("checkpoint", KEPT, (Part("linear"), DROP)))),), 0.8)
def test_a_program_ends_as_in_eager_mode(parts: tuple[Part, ...], ratio: float) -> None:
    _held(parts, ratio)


@pytest.mark.soak
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS, RATIOS)
def test_many_programs_end_as_in_eager_mode(parts: tuple[Part, ...], ratio: float) -> None:
    _held(parts, ratio)
