"""Plans kept from run to run: the result of a search without the search, and never a plan that is not one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from magis.cases.run_case import CaseRun, run_case
from magis.planner import planning
from magis.planner.bench import Bench
from magis.planner.kept_plans import KeptPlans
from magis.planner.plans import Plan, PlanScratch
from magis.planner.subject import Subject
from magis.report.text_store import Kept
from magis.results import Case, CaseResult
from magis.search.budgeted_evaluator import Deadline, Objective

BLOCKS = "tests.api.nets:few_blocks"
CPU = Case(BLOCKS, "magis", "cpu", "small", memory_ratio=0.7, budget=300, timing_rounds=2)
GPU = dataclasses.replace(CPU, device="sim:rtx3090")
LATENCY = dataclasses.replace(GPU, memory_ratio=None, latency_ratio=1.1)


@pytest.fixture
def unsearched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a search is an error."""

    def searched(*_args: object) -> Plan:
        raise AssertionError("searched again")

    return lambda: monkeypatch.setattr(planning, "_search_all", searched)


def timeless(result: CaseResult) -> CaseResult:
    """Without what a clock said."""
    steps = {name: dataclasses.replace(getattr(result, name), times_ms=()) for name in ("original", "optimized")}
    return dataclasses.replace(result, ratio=None, search=dataclasses.replace(result.search, seconds=0.0), **steps)


@pytest.mark.parametrize("case", [CPU, GPU, LATENCY], ids=["cpu", "sim", "latency"])
def test_a_kept_plan_gives_the_result_of_the_search(case: Case, tmp_path: Path, unsearched: Callable[[], None]) -> None:
    first = run_case(case, cache=Bench(kept=tmp_path))
    unsearched()
    again = run_case(case, cache=Bench(kept=tmp_path))
    assert timeless(first) == timeless(again)
    assert again.search.states > 1
    assert again.numbers in ("bit-identical", "not run")


def test_whatever_a_search_depends_on_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(kept=tmp_path)
    run_case(GPU, cache=bench)
    changes: list[dict[str, Any]] = [
        {"budget": 301}, {"seed": 1}, {"memory_ratio": 0.71}, {"device": "sim:v100"}, {"dtype": "bfloat16"},
    ]  # fmt: skip
    for count, change in enumerate(changes, 1):
        assert len(list(tmp_path.iterdir())) == count
        run_case(dataclasses.replace(GPU, **change), cache=bench)
    monkeypatch.setattr("magis.report.text_store.code_digest", lambda *_further: "other code")
    run_case(GPU, cache=Bench(kept=tmp_path))
    assert len(list(tmp_path.iterdir())) == len(changes) + 2


def test_a_search_that_seconds_ended_is_not_kept(tmp_path: Path) -> None:
    case = dataclasses.replace(GPU, memory_ratio=0.5, budget=None, seconds=1e-6)
    assert run_case(case, cache=Bench(kept=tmp_path)).search.stopped_by_seconds
    assert list(tmp_path.iterdir()) == []


# --- entries that are not what they seem -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shelf:
    """One kept plan, and how to read a changed one."""

    plans: KeptPlans
    kept: Kept
    key: str
    scratch: PlanScratch
    goal: Objective
    text: str

    def load(self, text: str) -> Plan | None:
        self.kept.save(self.key, text)  # with its checksum
        return self.plans.load(self.key, self.scratch, self.goal)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Bench().subject(GPU)


@pytest.fixture
def shelf(subject: Subject, tmp_path: Path) -> Shelf:
    kept = Kept(tmp_path)
    plans, scratch = KeptPlans(kept), PlanScratch(subject, None)
    goal = Objective(memory_limit=int(0.7 * subject.original.peak_bytes))
    key = plans.key(subject, goal, "magis", 300, 0, None)
    found = planning._search_all(scratch, goal, 300, Deadline(None), 0, lambda _stage: None)
    plans.save(key, found, scratch, goal)
    text: list[str] = []
    kept.load(key, text.append)
    return Shelf(plans, kept, key, scratch, goal, text[0])


def figures(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        head, _, body = text.partition("\n")
        found = json.loads(head)
        change(found)
        return f"{json.dumps(found)}\n{body}"

    return changed


def set_to(name: str, value: object) -> Callable[[str], str]:
    return figures(lambda found: found.update({name: value}))


HOSTILE: dict[str, Callable[[str], str]] = {
    "a lower peak": figures(lambda found: found["planned"].update(peak_bytes=1000)),
    "fewer tensors": figures(lambda found: found["planned"].update(tensor_bytes=0)),
    "no peak": set_to("planned", None),
    "a list of peaks": set_to("planned", [1, 2]),
    "quicker": figures(lambda found: found.update(latency_ns=found["latency_ns"] - 1)),
    "never": set_to("latency_ns", 10**40),
    "not a number": set_to("latency_ns", float("nan")),
    "infinite": set_to("states", float("inf")),
    "half a state": set_to("states", 1.5),
    "fewer than none": set_to("swapped_bytes", -1),
    "true": set_to("recomputed_ops", True),
    "keeps no limit": set_to("feasible", False),
    "perhaps": set_to("feasible", "yes"),
    "words that are none": set_to("fission", 3),
    "a further figure": set_to("__class__", "os.system"),
    "digits without end": lambda text: '{"states": ' + "9" * 100_000 + "}\n" + text.partition("\n")[2],
    "deep": lambda text: "[" * 100_000 + "\n" + text.partition("\n")[2],
    "lines of nothing": set_to("lines", []),
    "a line that is no place": figures(lambda found: found["lines"].__setitem__(0, 10**6)),
    "a line in words": figures(lambda found: found["lines"].__setitem__(0, "net.py:1")),
    "no list of lines": set_to("lines", None),
    "no graph": lambda text: text.partition("\n")[0] + "\n",
    "half a graph": lambda text: text[: len(text) // 2],
    "an operator of its own": lambda text: text.replace("aten.mm.default", "evil.run.default"),
    "a file": lambda text: text.replace("aten.mm.default", "aten.from_file.default"),
    "large": lambda text: text.replace("temporary", "temporary 9", 1),
    "no versions": lambda text: re.sub(r"(reads \d+):\d+", r"\1:77", text, count=1),
    "nothing": lambda _text: "",
    "lists in lists": lambda text: text.replace("op ", "op 0 %1 = aten.mm.default(" + "[" * 10_000 + "\nop ", 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_entry_that_is_no_plan_of_the_step_is_one_warning(shelf: Shelf, name: str) -> None:
    changed = HOSTILE[name](shelf.text)
    assert changed != shelf.text
    with pytest.warns(RuntimeWarning, match="is not used, and made again") as said:
        assert shelf.load(changed) is None
    assert len(said) == 1
    assert list(shelf.kept.folder.iterdir()) == []


# --- whole results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["eager", "magis", "checkpoint"])
def test_a_kept_result_is_handed_back_and_says_so(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dataclasses.replace(CPU if strategy == "eager" else GPU, strategy=strategy)
    if strategy != "magis":
        case = dataclasses.replace(case, memory_ratio=None)
    first = run_case(case, cache=Bench(kept=tmp_path, keep_results=True))
    monkeypatch.setattr(CaseRun, "result", None)  # from here on nothing can run
    again = run_case(case, cache=Bench(kept=tmp_path, keep_results=True))
    assert again.note.startswith("from the cache of 20")
    assert again.note.endswith(": unchanged")
    assert dataclasses.replace(again, note="") == first


@pytest.mark.parametrize(("strategy", "device"), [("ddp", "cpu"), ("magis+fsdp", "sim:rtx3090")])
def test_a_kept_result_of_ranks_is_handed_back(
    strategy: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratio = 0.8 if strategy.startswith("magis+") else None
    case = Case(BLOCKS, strategy, device, "small", memory_ratio=ratio, budget=20, timing_rounds=2, ranks=2)
    with closing(Bench(kept=tmp_path, keep_results=True)) as bench:
        first = run_case(case, cache=bench)
    assert (first.ranks[0].measured is not None) == (device == "cpu")
    for place in ("planned_rank_cases.planned_on_ranks", "rank_cases.ranked_result"):  # from here on nothing can run
        monkeypatch.setattr(f"magis.extensions.ranks.{place}", None)
    again = run_case(case, cache=Bench(kept=tmp_path, keep_results=True))
    assert again.note.startswith("from the cache of 20")
    assert dataclasses.replace(again, note="") == first
    for other in (dataclasses.replace(case, ranks=4), dataclasses.replace(case, seed=1)):
        with pytest.raises(TypeError):
            run_case(other, cache=Bench(kept=tmp_path, keep_results=True))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, CaseResult]:
    """Keeps the result of a case, which is there, too."""
    bench = Bench(kept=tmp_path_factory.mktemp("kept"), keep_results=True)
    return bench, run_case(GPU, cache=bench)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result["optimized"].update(simulated_ms=float("nan")),
        lambda result: result.update(numbers=7),
        lambda result: result.update(more=7),
    ],
)
def test_what_is_no_result_is_one_warning(
    change: Callable[[dict[str, Any]], object], shared: tuple[Bench, CaseResult]
) -> None:
    bench, first = shared
    assert bench.kept is not None
    (path,) = (path for path in bench.kept.folder.iterdir() if path.name.startswith("result-"))
    data = json.loads(path.read_text().partition("\n")[2])
    change(data["result"])
    bench.kept.save(path.stem, json.dumps(data))
    with pytest.warns(RuntimeWarning, match="made again") as said:
        again = run_case(GPU, cache=bench)
    assert len(said) == 1
    assert timeless(again) == timeless(first)
