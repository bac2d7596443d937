"""Small steps to the end: the exact optimum (or its best bound), our plan, and the bound that every plan comes with.

    python benchmarks/exact.py [name ...] [--share 0.9 0.6 0.3 0.1] [--seconds 60] [--again 1] [--free] [--output FILE]

Five networks, at several limits each: a limit lies that share of the way from the bytes that no plan avoids to the
peak without recomputation. Times are those of a simulated RTX 3090, nothing is swapped. *exact*: CP-SAT, each node at
most so many times again, first runs in our plan's order unless `--free`; "<" where it found no proof in its seconds,
and the figure is the best plan, ">" where it has a bound alone, "none" where there is no plan. *ours*: the search at
its usual budget. *bound*: that of magis.search.latency_bound, which CP-SAT is told; "never" where the limit is below
the bytes of all plans, or where no order with any recomputations fits (`lib/pebble_game.py`). Figures are latency
beyond the step's that recomputes nothing, as a share of it. Exits with 1 where a plan is below a proven optimum, or a
bound above a plan.

`pip install --no-deps ortools==9.15.6755 absl-py immutabledict`: it asks for an older protobuf than constraints.txt
has, but runs with that one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

import torch
from lib.exact_program import Exact, solve
from lib.pebble_game import has_no_schedule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from magis.capture import capture
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import find_device
from magis.ops.optimizers import OptimizerSpec
from magis.rewrite.functionalize import functionalize, untangle
from magis.search.budgeted_evaluator import Objective
from magis.search.driver import search
from magis.search.latency_bound import NEVER, latency_lower_bound
from magis.search.pareto_sweep import BRIEF, sweep
from magis.simulate.compiled_problem import compile_problem
from magis.simulate.evaluator import lower_bound
from magis.simulate.problem import Problem

HEAD = f"{'step':12} {'nodes':>5} {'limit':>6} {'exact':>9} {'ours':>8} {'bound':>8}"


class Attention(nn.Module):
    """One layer of a transformer, its attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.qkv = nn.Linear(256, 768)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 16, -1) @ v
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Convolutions around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def _stack(make: Callable[[], nn.Module], count: int) -> nn.Module:
    return nn.Sequential(*(make() for _ in range(count)))


def _uneven() -> nn.Module:
    widths = (512, 2048, 256, 1024, 512, 4096, 64)
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers)


def _down() -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((8, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers)


STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: _stack(lambda: nn.Sequential(nn.Linear(512, 512), nn.Tanh()), 6), (4096, 512)),
    "uneven": (_uneven, (4096, 512)),
    "attention": (lambda: _stack(Attention, 1), (32, 256, 256)),
    "residual": (lambda: _stack(lambda: Residual(64), 3), (32, 64, 56, 56)),
    "down": (_down, (64, 8, 64, 64)),
}


def problem_of(name: str) -> Problem:
    """The step as arrays: in the form that is searched, without a link to the host."""
    make, shape = STEPS[name]
    torch.manual_seed(0)
    module, batch = make(), torch.randn(shape)
    with torch.no_grad():
        target = torch.zeros_like(module(batch[:1])).expand(shape[0], *(-1 for _ in module(batch[:1]).shape[1:]))
    found = capture(module, (batch,), (target.contiguous(),), F.mse_loss, OptimizerSpec("sgd", lr=0.1))
    costs = RooflineCosts(find_device("sim:rtx3090", ""), None, {})
    problem: Problem = compile_problem(untangle(functionalize(found.graph)), costs, reuse=True).problem
    return problem


def rows(name: str, shares: list[float], seconds: float, again: int, free: bool, wrong: list[str]) -> Iterator[str]:
    """The lines of one step."""
    problem = replace(problem_of(name), xfer_ns_per_byte=0.0)
    base = int(problem.node_ns.sum() + problem.blk_ns.sum())
    floor, peak = lower_bound(problem), sweep(problem, BRIEF).points[-1].peak
    for share in shares:
        limit = int(floor + share * (peak - floor))
        ours = search(problem, Objective(memory_limit=limit))
        bound = latency_lower_bound(problem, limit)
        known = ours.latency_ns if ours.feasible else None
        if known is not None and bound > known:
            wrong.append(name)
        order = None if free else ours.order
        exact = Exact(None, NEVER, proven=True)
        if bound < NEVER and not ours.feasible and has_no_schedule(problem, limit):
            bound = NEVER
        if bound < NEVER:
            exact = solve(problem, limit, order, again=again, seconds=seconds, least_ns=bound, known_ns=known)
        line = (
            f"{name:12} {problem.n_nodes:5} {limit / peak:6.3f} {_exact(exact, base):>9}"
            f" {_share(ours.latency_ns, base) if ours.feasible else 'missed':>8}"
            f" {'never' if bound == NEVER else _share(bound, base):>8}"
        )
        if exact.proven and ours.feasible and (exact.latency_ns is None or ours.latency_ns < exact.latency_ns):
            wrong.append(name)
        yield line


def _exact(exact: Exact, base: int) -> str:
    if exact.latency_ns is None:
        return "none" if exact.proven else f">{_share(exact.bound_ns, base)}"
    return f"{'' if exact.proven else '<'}{_share(exact.latency_ns, base)}"


def _share(ns: int, base: int) -> str:
    return f"{ns / base - 1:+.4f}"


def main() -> int:
    """Print the table."""
    parser = arguments(
        __doc__, names=list(STEPS), share=[0.9, 0.6, 0.3, 0.1], seconds=60.0, again=1, free=False, output=Path
    )  # fmt: skip
    asked = parser.parse_args()
    wrong: list[str] = []
    lines = chain.from_iterable(
        rows(name, asked.share, asked.seconds, asked.again, asked.free, wrong) for name in asked.names
    )
    printed(chain(head(), (HEAD,), lines), asked.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
