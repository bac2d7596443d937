"""Which operators of every model can be cut into parts, and why the others cannot.

    python benchmarks/splits_report.py [name or glob ...] [--preset small] [--device cpu|cuda] [--optimizer sgd]

Columns: calls in the captured step; calls with at least one split; distinct operators, and those of which no call has
a split; splits per call on average; the largest number of parts of any split. Below, for each model, the calls without
a split, by operator and reason. Nothing is run: steps are captured on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lib.program import arguments
from torch._subclasses import FakeTensorMode

from magis.capture import capture
from magis.graph import Graph
from magis.models import PRESETS, get, resolve
from magis.ops.optimizers import OPTIMIZER_KINDS, OptimizerSpec
from magis.ops.splits import splits, why_opaque


@dataclass(frozen=True)
class Report:
    """What splits a step's operators have."""

    name: str
    calls: int
    cut: int
    operators: int
    never: int
    axes: int
    """Splits of all calls together."""
    extent: int
    reasons: dict[tuple[str, str], int]
    """Calls without a split by operator and reason."""

    def lines(self) -> Iterator[str]:
        axes = self.axes / self.calls
        yield (
            f"{self.name:16} {self.calls:6} {self.cut:6} {100 * self.cut / self.calls:6.1f}% {self.operators:9}"
            f" {self.never:6} {axes:6.2f} {self.extent:7}"
        )
        for (target, reason), count in sorted(self.reasons.items()):
            yield f"    {count:5} x {target}: {reason}"


def captured(name: str, preset: str, device: str, optimizer: str | None) -> Graph:
    """The model's step with its own optimizer, or another one."""
    with FakeTensorMode():
        workload = get(name).build(preset, 0)
    rule = workload.optimizer if optimizer is None else OptimizerSpec(optimizer)
    step = capture(
        workload.module, workload.inputs, workload.targets, workload.loss_fn, rule,
        device=device, explicit_attention=workload.explicit_attention,
    )  # fmt: skip
    return step.graph


def report(name: str, graph: Graph) -> Report:
    """Count the splits of every call."""
    found = [(op.target, splits(op, graph.values)) for op in graph.ops]
    cut = {target for target, ways in found if ways}
    opaque = [op for op, (_, ways) in zip(graph.ops, found, strict=True) if not ways]
    return Report(
        name=name,
        calls=len(graph.ops),
        cut=len(graph.ops) - len(opaque),
        operators=len({target for target, _ in found}),
        never=len({target for target, _ in found} - cut),
        axes=sum(len(ways) for _, ways in found),
        extent=max((split.extent for _, ways in found for split in ways), default=1),
        reasons=Counter((op.target, why_opaque(op, graph.values)) for op in opaque),
    )


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, names=["all", "seed"])
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--optimizer", choices=OPTIMIZER_KINDS, help="instead of the model's own")
    asked = parser.parse_args()
    print(f"{'model':16} {'calls':>6} {'cut':>6} {'share':>7} {'operators':>9} {'never':>6} {'axes':>6} {'parts':>7}")
    for name in resolve(asked.names):
        graph = captured(name, asked.preset, asked.device, asked.optimizer)
        print("\n".join(report(name, graph).lines()), flush=True)


if __name__ == "__main__":
    main()
