"""A cache of whole results: an unchanged step on an unchanged device is not run a second time.

The cache is opt-in, since a latency measured on an earlier day then replaces a new one; the result's note gives the
day. Files are trusted if their checksum is valid: who can write pytest's cache can write a conftest.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from magis.cases.contenders import strategy_of
from magis.child_process import cores
from magis.graph import digest
from magis.plain_records import from_plain, read_json, to_plain
from magis.planner.subject import Subject
from magis.report.text_store import UNSOUND, Kept
from magis.results import Case, CaseResult
from magis.runtime.measure import device_identity
from magis.strategies.distributed_names import carried_plan
from magis.strategies.strategy_names import family

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class KeptResults:
    """The cached results of one case."""

    kept: Kept
    subject: Subject
    case: Case

    def key(
        self,
        workspaces: Mapping[str, int] | None = None,
        expected_graph: str | None = None,
        bounds: Sequence[float] = (),
        *,
        rough: bool = False,
        pooled: bool = False,
    ) -> str:
        """Return the cache key of a result, a digest of all its inputs.

        That is the case, its captured step with eager's lifetimes and the lines that its tables name, the device and
        its prices, and what a baseline hands back. For ranks also the parts and plans by which the network is cut, and
        whether a pool (``pooled``) runs them, on how many cores.
        """
        captured, traced = self.subject.captured.original, self.subject.traced
        strategy = strategy_of(self.case, self.subject)
        wrapped = digest(self.subject.captured_as(strategy)[0].graph) if strategy and strategy.is_captured else ""
        return self.kept.key(
            "result",
            FORMAT,
            dataclasses.replace(self.case, seconds=None),
            self.subject.digest,
            sorted(captured.deaths.items()),
            [op.line for op in captured.graph.ops],
            (captured.numbers, captured.dtype, captured.rule),
            wrapped,
            (self.subject.roofline, self.subject.pricing.digest),
            sorted(device_identity(self.case.device).items()),
            self.subject.runs,
            # torch's settings that select kernels, and so numbers, scratch and times
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cuda.matmul.fp32_precision,
                torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
                torch.backends.mkldnn.enabled,
                torch.backends.cudnn.enabled,
                torch.backends.cudnn.benchmark,
                torch.backends.cudnn.deterministic,
            ),
            None if workspaces is None else sorted(workspaces.items()),
            (expected_graph, tuple(bounds), rough),
            (pooled and cores(), traced.blocks, str(traced.module), _carried_plans(traced.module))
            if family(self.case.strategy) == "distributed"
            else "",
        )

    def load(self, key: str) -> CaseResult | None:
        """Return the cached result of a key, with its day in the note; None if missing."""
        return self.kept.load(key, self._read_result)

    def save(self, key: str, result: CaseResult) -> CaseResult:
        """Cache a result and return it; not if it did not fit into memory, hit the time limit, or was timed on a busy
        machine."""
        doubtful = result.ratio is not None and bool(result.ratio.doubt)
        if doubtful or result.note or result.search.stopped_by_seconds or result.numbers.startswith("differs"):
            return result
        day = dt.datetime.now(tz=dt.UTC).date().isoformat()
        text = json.dumps({"day": day, "result": to_plain(result)}, sort_keys=True)
        with suppress(*UNSOUND):
            self._read_result(text)
            self.kept.save(key, text)
        return result

    def _read_result(self, text: str) -> CaseResult:
        """Parse a result. Raises one of ``UNSOUND`` for invalid text; the case is given by the key."""
        data = read_json(text)
        result, day = from_plain(CaseResult, data["result"]), dt.date.fromisoformat(data["day"])
        return dataclasses.replace(result, case=self.case, note=f"from the cache of {day.isoformat()}: unchanged")


def _carried_plans(module: nn.Module) -> list[tuple[str, str, str]]:
    """Return what a network, its parts and their configurations say of cuts: paths, names and contents of attributes.

    A style without a ``repr`` of its own is different in every process, and its result never taken up.
    """
    found = []
    for path, part in module.named_modules():
        found += [(path, name, repr(carried_plan(part, name))) for name in ("tp_plan", "sp_plan", "pp_plan")]
        found += [(path, name, repr(getattr(part, name, None))) for name in ("head_dim", "head_width")]
    return found
