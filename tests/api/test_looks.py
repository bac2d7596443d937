"""Two looks at a case's latency ratio: of steps made anew, and what becomes of those that differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from magis.cases import comparison as module
from magis.cases.run_case import run_case
from magis.planner.subject import Subject
from magis.results import Case, CaseResult
from magis.runtime.steps import EagerStep
from magis.runtime.timing import StoppingRule, Timing

Timed = Callable[..., tuple[CaseResult, list[int], list[str]]]
CASE = Case("tests.api.nets:few_blocks", "magis", "cpu", "small", memory_ratio=0.8, budget=300)


def around(ratio: float, waited: float = 0.0, pairs: int = 9) -> Timing:
    spread = [ratio * (0.99 + 0.02 * index / (pairs - 1)) for index in range(pairs)]
    return Timing((5.0,) * pairs, tuple(5.0 * each for each in spread), (waited,) * pairs)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Runs the case with scripted looks; its result, which eager step each look timed, and what was told."""

    def run(
        *script: Timing, bounds: tuple[float, ...] = (), rough: bool = False
    ) -> tuple[CaseResult, list[int], list[str]]:
        left = list(script)
        made: list[EagerStep] = []
        seen: list[int] = []
        told: list[str] = []
        eager = Subject.eager

        def remembered(subject: Subject, **more: int) -> EagerStep:
            made.append(eager(subject, **more))
            return made[-1]

        def interleave(first: object, second: object, patience: StoppingRule, **_more: object) -> Timing:
            step = next(cell.cell_contents for cell in first.__closure__)  # type: ignore[attr-defined]
            if patience.most == 0:  # whole steps, to see whether they are long enough to take turns
                return Timing((5.0,), (5.0,))
            seen.append(next(index for index, each in enumerate(made) if each is step))
            assert (patience is module.ROUGHLY) == rough
            return left.pop(0)

        monkeypatch.setattr(Subject, "eager", remembered)
        monkeypatch.setattr(module, "interleave", interleave)
        result = run_case(CASE, latency_bounds=bounds, rough=rough, progress=told.append)
        assert not left
        return result, seen, told

    return run


def test_the_second_look_is_at_steps_made_anew(timed: Timed) -> None:
    result, seen, told = timed(around(0.93), around(0.95))
    assert seen[0] != seen[1]
    assert told[-1] == "timing again"
    assert result.ratio is not None
    assert (round(result.ratio.ratio, 6), result.ratio.pairs, result.ratio.doubt) == (0.94, 18, "")


def test_what_a_second_look_does_not_repeat_is_in_doubt(
    timed: Timed,
) -> None:
    result, _, _ = timed(around(2.81), around(0.98), bounds=(0.9, 1.0))
    assert result.ratio is not None
    assert "2.810 [2.782, 2.838], 0.980 [0.970, 0.990]" in result.ratio.doubt
    assert result.note == ""


def test_a_busy_machine_gets_no_second_look(timed: Timed) -> None:
    result, seen, _ = timed(around(2.81, waited=0.6))
    assert len(seen) == 1
    assert result.ratio is not None
    assert result.ratio.doubt.startswith("the machine is too busy: threads waited for a core 60%")


def test_a_rough_ratio_is_one_look(timed: Timed) -> None:
    result, seen, _ = timed(around(2.81, waited=0.6), rough=True)
    assert len(seen) == 1
    assert result.ratio is not None
    assert result.ratio.doubt == ""
