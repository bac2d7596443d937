"""Users' own models are looked at before the first case runs: what is wrong with one ends the run as bad input does.

Options are checked when pytest is configured; that a factory's module branches on its data, lies on another device or
mixes data types is found only by building, capturing and running it. That would cost seconds in runs that need no
such model (`--collect-only`, a deselected case, a file's own tests), so it waits until the cases are chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import pytest

from magis.errors import CaptureError, UsageError
from magis.models.registry import is_factory
from pytest_magis.gate import Gate
from pytest_magis.harness import check_prices, check_with_magis, runs_every_case
from pytest_magis.outputs.terminal import progress_line
from pytest_magis.run_plan import PREFIX, PlannedCase


def check_factories(config: pytest.Config, gate: Gate, node_ids: Collection[str], *, keep: bool) -> None:
    """Check the operator profile, and the model of every chosen case that a factory makes. Raises pytest.UsageError in
    one line.

    Nothing is checked where another plugin may run the case, which may support what magis does not. `keep` says
    whether the cases run in this process, and may use the captures again.
    """
    if not runs_every_case(config):
        return
    chosen = _plain(node_ids)
    _check_profile(config, gate, chosen)
    for planned in _distinct((*gate.cases, *gate.fronts), chosen):
        with progress_line(config, planned.model) as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the case gives them again
            if progress is not None:
                progress("checking the model")
            problem = _problem(config, planned, keep=keep)
        if problem is not None:
            raise pytest.UsageError(problem)


def _check_profile(config: pytest.Config, gate: Gate, chosen: Collection[str]) -> None:
    """A profile of another device, data type or schema, before anything is measured with it."""
    seen = set()
    for planned in (*gate.cases, *gate.fronts):
        key = (planned.case.device, planned.case.dtype, planned.case.preset, planned.model)
        if key not in seen and f"{PREFIX}{planned.name}" in chosen:
            seen.add(key)
            try:
                check_prices(planned.case, config)
            except UsageError as error:
                raise pytest.UsageError(str(error)) from None


def _plain(node_ids: Collection[str]) -> set[str]:
    """--dist=loadgroup appends "@<group>" to them."""
    return {*node_ids, *(node_id.rpartition("@")[0] for node_id in node_ids)}


def _distinct(cases: Collection[PlannedCase], chosen: Collection[str]) -> Iterator[PlannedCase]:
    """One chosen case of each factory; two where one of them wraps the model's blocks, since that is a capture more."""
    seen = set()
    for planned in cases:
        key = (planned.model, "checkpoint" in planned.case.strategy)
        if is_factory(planned.case.model) and f"{PREFIX}{planned.name}" in chosen and key not in seen:
            seen.add(key)
            yield planned


def _problem(config: pytest.Config, planned: PlannedCase, *, keep: bool) -> str | None:
    call = pytest.CallInfo.from_call(
        lambda: check_with_magis(planned.case, config, keep=keep),
        when="setup",
        reraise=(KeyboardInterrupt, pytest.exit.Exception),
    )
    error = None if call.excinfo is None else call.excinfo.value
    if not isinstance(error, (UsageError, CaptureError)):
        return None  # fine, or a defect: the case meets it again and shows all of it
    text = str(error)
    return text if text.startswith(f"{planned.case.model}:") else f"{planned.model}: {text}"
