"""Every cell of a comparison in one run: the paper, the published search, other planners, our front, our plan, bounds.

    python benchmarks/cells.py [name or glob ...] [--device sim:rtx3090 ...] [--preset paper]
        [--memory 0.8 0.6 0.4 0.3 0.2] [--latency 1.1 1.05] [--states 3000] [--no-plans] [--no-peers]
        [--output FILE]

A row per model, device and limit. Under a latency limit the figure is the peak as a share of eager's, under a memory
limit the latency overhead to eager; everything is simulated. *published*: `magis.extensions.paper` with that many
states (the paper simulates about a thousand a minute for three minutes). *two-lev.*: torchtitan's two-level program
of keep, recompute and offload; *sac*: PyTorch's automatic selective checkpointing (``benchmarks.lib.planners``). Both
plan the whole step in program order; each may try dozens of budgets, and its best plan by our evaluator counts.
*front*: the best point of magis.pareto's front, all limits from one search. *plan*: what a case of the gate would
find. *linear*: the optimum of a linear program of keep, swap and recompute for the step in program order without
fission: a guide to what fractions of decisions would reach, no certified bound. *bound*: no plan gets below this
peak; under memory limits the distance of the limit to it. Seconds are this machine's, capture left out; those of the
front are in the model's first row, those of other planners mostly, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from lib.paper_figures import PAPER_LATENCY, PAPER_MEMORY
from lib.planners.optimum import Relaxation
from lib.planners.selective import selective
from lib.planners.setting import Calibrated, Setting, origins
from lib.planners.two_level import two_level
from torch import nn

from magis.extensions.paper.coordinated_search import STATES, PaperSearch
from magis.models import PRESETS, resolve
from magis.planner.bench import Bench
from magis.planner.fronts import front_of
from magis.planner.planning import plan as plan_step
from magis.planner.plans import Plan, PlanScratch
from magis.planner.subject import Subject
from magis.results import Case, ParetoFront
from magis.rewrite.functionalize import untangle
from magis.search.budgeted_evaluator import Objective
from magis.simulate.compiled_problem import compile_problem

HEAD = (
    f"{'model':14} {'device':12} {'limit':>9} {'paper':>7} {'publish.':>8} {'secs':>5} {'two-lev.':>8} {'sac':>7}"
    f" {'secs':>5} {'front':>7} {'secs':>5} {'plan':>7} {'secs':>5} {'linear':>7} {'bound':>7}  best"
)


@dataclass(frozen=True)
class Limit:
    """Of memory or of latency, as ratios to eager's."""

    memory: float | None = None
    latency: float | None = None

    @property
    def text(self) -> str:
        return f"lat {self.latency:g}" if self.memory is None else f"mem {self.memory:g}"

    def goal(self, subject: Subject) -> Objective:
        if self.memory is not None:
            return Objective(memory_limit=int(self.memory * subject.original.peak_bytes))
        return Objective(latency_limit_ns=int((self.latency or 0.0) * subject.original_ns))

    def figure(self, subject: Subject, peak: int, latency_ns: float) -> float | None:
        """The peak ratio or the overhead; None if the limit is not kept."""
        if not self.goal(subject).met(peak, int(latency_ns)):
            return None
        if self.memory is not None:
            return latency_ns / subject.original_ns - 1.0
        return peak / subject.original.peak_bytes

    def paper(self, model: str) -> float | None:
        """The paper's figure: of the seed's networks on its own device."""
        table = PAPER_LATENCY.get(f"{self.latency}", {})
        if self.memory is not None:
            table = PAPER_MEMORY.get(f"{self.memory:g}", {})
        return table.get(model.removeprefix("seed-")) if model.startswith("seed-") else None


@dataclass(frozen=True)
class Peers:
    """What others would plan for one step, and how far fractions of decisions would get."""

    two_level: Calibrated
    selective: Calibrated
    linear: Relaxation

    @staticmethod
    def of(subject: Subject) -> Peers:
        known = PlanScratch(subject, None).known_to_search(subject.normal)
        compiled = compile_problem(subject.normal, subject.costs(known), reuse=subject.source.reuse)
        modules = subject.traced.module.named_modules()
        called = [path for path, module in modules if type(module).forward is not nn.Module.forward]
        setting = Setting(compiled.problem, origins(compiled, called, subject.blocks))
        return Peers(two_level(setting), selective(setting), Relaxation(compiled.problem))

    def figures(self, subject: Subject, limit: Limit) -> tuple[float | None, float | None, float | None]:
        """The figures of the three for a limit."""
        goal = limit.goal(subject)
        found = (self.two_level.best(goal), self.selective.best(goal), self.linear.solve(goal))
        first, second, third = (
            None if each is None else limit.figure(subject, each.peak, each.latency_ns) for each in found
        )
        return first, second, third


def rows(case: Case, *, limits: list[Limit], states: int, plans: bool, peers: bool) -> Iterator[str]:
    """The lines of one model on one device."""
    subject = Bench().subject(case)
    front = front_of(case, subject)
    others = Peers.of(subject) if peers else None
    for number, limit in enumerate(limits):
        paper = limit.paper(case.model) if case.device == "sim:rtx3090" else None
        theirs, theirs_s = _published(subject, limit, states)
        started = time.perf_counter()
        layered, checkpointed, linear = (None, None, None) if others is None else others.figures(subject, limit)
        others_s = time.perf_counter() - started
        fronts = _on_front(subject, front, limit)
        plan, ours_s = planned(subject, limit) if plans else (None, 0.0)
        ours = None if plan is None else limit.figure(subject, plan.planned.peak_bytes, plan.latency_ns)
        bound = subject.lower_bound / subject.original.peak_bytes
        known = {"paper": paper, "published": theirs, "two-level": layered, "sac": checkpointed}
        known |= {"front": fronts, "plan": ours}
        reached = {name: round(figure, 4) for name, figure in known.items() if figure is not None}
        best = " = ".join(name for name, figure in reached.items() if figure == min(reached.values()))
        yield (
            f"{case.model:14} {case.device:12} {limit.text:>9} {_cell(paper)} {_cell(theirs):>8} {theirs_s:5.0f}"
            f" {_cell(layered):>8} {_cell(checkpointed)} {others_s:5.0f}"
            f" {_cell(fronts)} {front.seconds if number == 0 else 0.0:5.1f} {_cell(ours)} {ours_s:5.0f}"
            f" {_cell(linear)} {bound if limit.memory is None else limit.memory - bound:7.3f}  {best}"
        )


def _cell(figure: float | None) -> str:
    return f"{'-':>7}" if figure is None else f"{figure:7.4f}"


def _published(subject: Subject, limit: Limit, states: int) -> tuple[float | None, float]:
    started = time.perf_counter()
    found = PaperSearch(untangle(subject.normal), subject.roofline, limit.goal(subject), states=states).run()
    return limit.figure(subject, found.figures.peak, found.figures.latency_ns), time.perf_counter() - started


def _on_front(subject: Subject, front: ParetoFront, limit: Limit) -> float | None:
    point = front.best(memory_ratio=limit.memory, latency_ratio=limit.latency)
    return None if point is None else limit.figure(subject, point.peak_bytes, point.latency_ms * 1e6)


def planned(subject: Subject, limit: Limit, cap: float | None = None) -> tuple[Plan, float]:
    """What a case of the gate would find within so many seconds, and how many it took."""
    started = time.perf_counter()
    goal = limit.goal(subject)
    found = plan_step(
        subject,
        memory_limit=goal.memory_limit,
        latency_limit_ns=goal.latency_limit_ns,
        budget=None,
        seconds=cap,
        seed=0,
        stored=None,
    )
    return found, time.perf_counter() - started


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(
        __doc__,
        names=["seed"],
        device=["sim:rtx3090"],
        memory=[0.8, 0.6, 0.4, 0.3, 0.2],
        latency=[1.1, 1.05],
        states=STATES,
        no_plans=False,
        output=Path,
    )
    parser.add_argument("--preset", default="paper", choices=PRESETS)
    parser.add_argument("--no-peers", action="store_true", help="without other planners")
    asked = parser.parse_args()
    limits = [*(Limit(latency=each) for each in asked.latency), *(Limit(memory=each) for each in asked.memory)]
    cases = [Case(name, "magis", device, asked.preset) for name in resolve(asked.names) for device in asked.device]
    of_case = partial(rows, limits=limits, states=asked.states, plans=not asked.no_plans, peers=not asked.no_peers)
    printed(chain(head(), (HEAD,), chain.from_iterable(map(of_case, cases))), asked.output)


if __name__ == "__main__":
    main()
