"""What a plan does on a machine that is not quite the one that it was made for: latency to eager's, by slack.

    python benchmarks/robust.py [name or glob ...] [--device sim:rtx3090 sim:h200] [--preset paper]
        [--memory 0.4] [--latency 1.1] [--slack 0.2] [--output FILE]

A row per model, device, limit and slack of the plan (none, and the one that is asked for). The plan is run as it is,
operator by operator and copy by copy, on four machines, each against eager there: *nominal*, *link* (slower by the
slack), *kernels* (quicker by half of it), *both*. What the search says of the plan is no part of these columns but
*planned*; where *planned* and *nominal* differ, the search and the machine do not count the same. *least*: no plan that
stands the row's slack within the limit on memory (of a limit on latency: within its peak) takes less; with loops, none
of the step as it is cut. *over*: by how many points the worst machine exceeds the limit on latency, or under a limit on
memory the nominal machine; *costs*: by how many points the plan's nominal latency is above that of the plan without
slack (of a limit on latency: its peak).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from lib.program import arguments, head, printed

from magis.quiet import before_torch

before_torch()

from cells import Limit, planned

from magis.models import PRESETS, resolve
from magis.planner.bench import Bench
from magis.planner.plans import latency_ratios
from magis.results import Case

HEAD = (
    f"{'model':14} {'device':12} {'limit':>8} {'slack':>5} {'peak':>6} {'planned':>7} {'nominal':>7} {'link':>7}"
    f" {'kernels':>7} {'both':>7} {'least':>7} {'over':>6} {'costs':>6} {'swapped':>9} {'secs':>5}"
)


def rows(case: Case, *, limits: list[Limit], slack: float) -> Iterator[str]:
    """The lines of one model on one device. Seconds are of this process alone."""
    for limit in limits:
        without: tuple[float, float] | None = None
        for own in (0.0, slack):
            subject = Bench().subject(Case(case.model, case.strategy, case.device, case.preset, slack=own))
            started = time.process_time()
            plan, _ = planned(subject, limit)
            spent = time.process_time() - started
            ratios = latency_ratios(subject, plan.graph, slack)
            promised = plan.latency_ns / subject.latency_ns(subject.captured.original.graph)
            peak = plan.planned.peak_bytes / subject.original.peak_bytes
            allowed = ratios[0] if limit.latency is None else limit.latency
            without = without or (ratios[0], peak)
            costs = ratios[0] - without[0] if limit.latency is None else peak - without[1]
            least = (plan.latency_bound_ns or 0) / subject.latency_ns(subject.captured.original.graph)
            told = (promised, *ratios, least)
            yield (
                f"{case.model:14} {case.device:12} {limit.text:>8} {own:5g} {peak:6.3f}"
                f" {' '.join(f'{each:7.4f}' for each in told)} {100 * (max(ratios) - allowed):6.2f} {100 * costs:6.2f}"
                f" {plan.swapped_bytes / 1e6:6.0f} MB {spent:5.0f}{'' if plan.feasible else ' not met'}"
            )


def main() -> None:
    """Print the table, and write it."""
    parser = arguments(
        __doc__,
        names=[f"seed-{name}" for name in ("bert", "resnet50", "vit", "unet", "unetpp", "gpt_neo", "btlm")],
        device=["sim:rtx3090", "sim:h200"],
        memory=[0.4],
        latency=[1.1],
        slack=Case.slack,
        output=Path,
    )
    parser.add_argument("--preset", default="paper", choices=PRESETS)
    asked = parser.parse_args()
    limits = [*(Limit(memory=each) for each in asked.memory), *(Limit(latency=each) for each in asked.latency)]
    cases = [Case(name, "magis", device, asked.preset) for name in resolve(asked.names) for device in asked.device]
    of_case = partial(rows, limits=limits, slack=asked.slack)
    printed(chain(head(), (HEAD,), chain.from_iterable(map(of_case, cases))), asked.output)


if __name__ == "__main__":
    main()
