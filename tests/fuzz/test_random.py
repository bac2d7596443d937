"""Random training steps and loops compute what eager mode does, in the bytes that are said, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.child import WAYS, drawn
from tests.fuzz.judge import different, eager, in_loop, rounded_otherwise, trains
from tests.fuzz.rounding import OtherRounding
from tests.fuzz.script import Script, printed
from tests.fuzz.shrink import shrunk
from tests.fuzz.soak import judged_in_children, table

PROGRAMS, LOOPS = range(40), range(15)
ALL_PROGRAMS, ALL_LOOPS, PIECE = 2000, 500, 250
REFUSED = 0.05


@pytest.mark.parametrize("seed", PROGRAMS)
def test_a_program(seed: int) -> None:
    """Each in one of the ways in which it can run; all of them are for the soak."""
    script, seen = drawn("programs", seed)
    outcome = WAYS[("loop", "plan", "case")[seed % 3]](script, seen)
    assert not outcome.failed, f"{outcome.detail}\n{printed(script)}"


@pytest.mark.parametrize("seed", LOOPS)
def test_a_loop(seed: int) -> None:
    script, seen = drawn("loops", seed)
    outcome = in_loop(script, seen)
    assert not outcome.failed, f"{outcome.detail}\n{printed(script)}"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, ALL_PROGRAMS, PIECE))
def test_programs(first: int) -> None:
    _check("programs", range(first, first + PIECE))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, ALL_LOOPS, PIECE))
def test_loops(first: int) -> None:
    _check("loops", range(first, first + PIECE))


def _check(kind: str, seeds: range) -> None:
    rows = list(judged_in_children(kind, seeds))
    kinds = [row["kind"] for row in rows]
    assert kinds.count("equal") + kinds.count("refused") == len(seeds), table(rows)
    assert kinds.count("refused") <= REFUSED * len(seeds), table(rows)
    assert sum(row.get("recomputed", 0) > 0 for row in rows) > len(seeds) / 2, table(rows)


# --- the fuzzing itself -----------------------------------------------------------------------------------------------


def test_a_seed_is_a_script() -> None:
    """Else a failure could not be told by its seed."""
    for kind in ("programs", "loops"):
        assert drawn(kind, 3)[0] == drawn(kind, 3)[0] != drawn(kind, 4)[0]


def plain(*forward: str) -> Script:
    """A step of these statements, which train w0 and w1."""
    return Script(
        init=("self.w0 = nn.Parameter(torch.randn(4))", "self.w1 = nn.Parameter(torch.randn(4))", "self.calls = 0"),
        forward=forward,
        result="v5",
        setup=("model = Net()",),
        optimizer=("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",),
        batch=("x0 = torch.randn(3, 4)", "t0 = torch.randn(3, 4)"),
        events=("step(0)", "step(1)"),
    )


def test_what_fails_is_shortened_to_what_makes_it_fail() -> None:
    script = plain("v1 = x0 + self.w0", "v2 = v1.tanh()", "v3 = v2.exp()", "v4 = v3 * self.w1", "v5 = v4 - v1")
    found = shrunk(script, lambda each: trains(each) is not None and ".exp()" in " ".join(each.forward))
    assert len(found.forward) == len(found.init) == len(found.events) == 1, printed(found)


@pytest.mark.parametrize(
    "forward",
    [
        ("v1 = F.dropout(x0 * self.w0, 0.5)", "v5 = v1 * self.w1"),
        ("v1 = x0.t()", "x0[:, 1:].mul_(0.5)", "v2 = torch.tanh(v1.t() * self.w0)", "v5 = torch.tanh(v2) * self.w1"),
    ],
    ids=["a generator state larger than the step", "views opened before a write or behind it"],
)
def test_random_plans_of_a_step_are_taken_up_and_have_its_very_numbers(forward: tuple[str, ...]) -> None:
    script = plain(*forward)
    expected = eager(script)
    outcomes = [in_loop(script, expected, plan_seed=seed) for seed in range(12)]
    assert {outcome.kind for outcome in outcomes} == {"equal"}, [outcome.detail for outcome in outcomes]
    assert sum(outcome.recomputed > 0 for outcome in outcomes) > 6
    assert not any(outcome.parts for outcome in outcomes), "they were compared bit by bit"


@pytest.mark.parametrize(
    ("event", "difference"),
    [
        ("model.register_forward_hook(lambda m, a, o: o)", ""),
        ("torch.rand(1)", "generator differs"),
        ("with torch.no_grad():\n    model.w0.mul_(2)", "loss differs"),
        ("model.calls = 3", "attribute differs"),
        ("optimizer.param_groups[0]['lr'] = 0.2", "parameter differs"),
    ],
)
def test_a_loop_that_went_another_way_is_seen(event: str, difference: str) -> None:
    """What eager mode alone did between the steps: the first thing that differs afterwards is named."""
    script = plain("v5 = x0 + self.w0 * self.w1")
    expected = eager(replace(script, events=("step(0)", event, "step(1)")))
    assert in_loop(script, expected).detail.partition(":")[0] == difference


def centred(optimizer: str) -> Script:
    """A step in which the gradient of w0 is zero but for rounding errors."""
    script = plain("v1 = x0 * self.w1 + self.w0", "v5 = v1 - v1.mean(0)")
    return replace(script, optimizer=(f"optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)",))


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "Rprop"])
def test_what_follows_rounding_errors_alone_is_as_open_as_eager_mode_leaves_it(optimizer: str) -> None:
    script = centred(optimizer)
    expected, ours = eager(script), eager(script, OtherRounding(seed=1000, sign=1))
    assert "parameter w0" in different(expected, ours, roughly=0.01), "its update is as large as any other"
    assert different(expected, ours, roughly=0.01, others=rounded_otherwise(script)) == ""


@pytest.mark.parametrize(("event", "wrong"), [("model.w1.mul_(1.03)", "w1"), ("model.w0.add_(1)", "w0")])
@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_rounding_errors_excuse_nothing_else(event: str, wrong: str, optimizer: str) -> None:
    """Neither other numbers where eager mode is sure of them, nor larger ones where it is not."""
    script = centred(optimizer)
    ours = eager(replace(script, events=("step(0)", f"with torch.no_grad():\n    {event}", "step(1)")))
    found = different(eager(script), ours, roughly=0.01, others=rounded_otherwise(script))
    assert found.startswith(f"parameter differs: parameter {wrong} of step 1"), found
