"""What is known of the scratch of a subject's operators, each signature found out once."""

from __future__ import annotations

from collections.abc import Callable

from magis.backend.contents import Needs, needs
from magis.backend.recorded import record_workspaces
from magis.backend.steps import GraphStep
from magis.backend.workspaces import measure_workspaces
from magis.cost.signature import signature
from magis.ir import Graph, every_op

__all__ = ["Scratches"]


class Scratches:
    """Workspace bytes of this machine, by signature."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._unknown: dict[str, str] = {}
        """Operator -> module of one call, of those that nothing could measure."""

    def add(self, graph: Graph, limit: int | None, step: Callable[[], GraphStep] | None) -> None:
        """Find out what the graph's operators need; `step` makes one that runs the graph, where that is possible.

        Each operator by itself but for those whose scratch hangs on what is in their tensors: these in the step.
        """
        missing = {
            key: (op, values)
            for op, values in every_op(graph)
            if not op.target.startswith("magis.") and (key := signature(op, values)) not in self.known
        }
        if step is not None and any(needs(*call) is not Needs.ANYTHING for call in missing.values()):
            ready = step()
            found = record_workspaces(graph, ready.tensors, ready.numbers())
            of_numbers = [key for key, call in missing.items() if needs(*call) is not Needs.ANYTHING]
            self.known.update({key: found[key] for key in of_numbers if key in found})
        missing = {key: call for key, call in missing.items() if key not in self.known}
        if missing:
            self.known.update(measure_workspaces(missing.values(), limit))
        if limit is None:
            self._unknown.update({op.target: op.module for key, (op, _) in missing.items() if key not in self.known})

    @property
    def note(self) -> str:
        """Which operators nothing is known of; empty if there are none."""
        if not self._unknown:
            return ""
        calls = ", ".join(f"{target} in {module or '(root)'}" for target, module in sorted(self._unknown.items()))
        return f"workspace unknown: {calls}"
