"""Whole results kept from run to run: for an unchanged step on the same device nothing is run again.

Asked for by name alone, since a latency that was measured some day then stands for one of today. The note of a result
says of which day it is. Its file is trusted as far as its checksum goes: whoever can write pytest's cache can write a
conftest.py.
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
from magis.strategies.strategy_names import family

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class KeptResults:
    """The results of one case in a folder."""

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
        """Return the key of a result, a digest of all that it depends on.

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
            # torch's settings that choose kernels, and with them numbers, scratch and times
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
            if self._is_ranked
            else "",
        )

    def load(self, key: str) -> CaseResult | None:
        """Return the result under the key; its note says of which day it is."""
        return self.kept.load(key, self._read_result)

    def save(self, key: str, result: CaseResult) -> CaseResult:
        """Keep a result, unless it depends on the moment; return it. It does where it did not fit into memory, a cap
        in seconds ended it, or the machine was too busy to time it."""
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
        """Read a result from text. Raises one of ``UNSOUND`` if it is none; whose it is the key has said."""
        data = read_json(text)
        result, day = from_plain(CaseResult, data["result"]), dt.date.fromisoformat(data["day"])
        return dataclasses.replace(result, case=self.case, note=f"from the cache of {day.isoformat()}: unchanged")

    @property
    def _is_ranked(self) -> bool:
        return family(self.case.strategy) == "distributed"


def _carried_plans(module: nn.Module) -> list[tuple[str, str, str]]:
    """Return what a network, its parts and their configurations say of cuts: paths, names and contents of attributes.

    A style without a ``repr`` of its own is different in every process, and its result never taken up.
    """
    found = []
    for path, part in module.named_modules():
        for plan in ("tp_plan", "sp_plan", "pp_plan"):
            places = ((part, plan), (part, f"_{plan}"), (getattr(part, "config", None), f"base_model_{plan}"))
            found += [(path, name, repr(said)) for owner, name in places if (said := getattr(owner, name, None))]
        found += [(path, name, repr(getattr(part, name, None))) for name in ("head_dim", "head_width")]
    return found
