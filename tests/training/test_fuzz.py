"""Random small modules through magis.optimize: eager's numbers or a clear refusal, and few refusals."""

from __future__ import annotations

import copy

import pytest
import torch

from magis import MagisError, optimize
from tests.training.loops import assert_same
from tests.training.random_modules import Drawn, draw

SAMPLE, ALL = range(8), range(500)
STEPS = 2
REFUSED = 0.05
RATIOS = (0.98, 0.9, 0.8)


def _outcome(drawn: Drawn, seed: int) -> str:
    """ "equal", "close" (a plan in parts), the refusal, or "none" for a module that eager cannot train either."""
    if not _trains(copy.deepcopy(drawn)):
        return "none"
    module, twin = drawn.module, copy.deepcopy(drawn.module)
    ours, theirs = drawn.optimizer(module), drawn.optimizer(twin)
    data = (drawn.inputs, drawn.targets)
    step = None
    for ratio in RATIOS[seed % 3 :: -1]:  # a limit that can be kept: the lowest of these that is
        try:
            step = optimize(module, drawn.loss_fn, ours, data, memory_ratio=ratio, budget=60)
            break
        except MagisError as error:
            if "no plan found" not in str(error):
                return f"refused: {error}"
    if step is None:  # tiny steps have nothing to spare: at the eager peak there is always a plan
        step = optimize(module, drawn.loss_fn, ours, data, memory_ratio=1.0, budget=60)
    exactly = not step.report().fission
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = step(*data)
        torch.manual_seed(number)
        theirs.zero_grad()
        expected = drawn.loss_fn(twin(*drawn.inputs), *drawn.targets)
        expected.backward()
        theirs.step()
        if exactly:
            assert torch.equal(loss, expected.detach()), drawn.parts
        else:
            assert torch.allclose(loss, expected.detach(), rtol=1e-3, atol=1e-5), drawn.parts
    if exactly:
        theirs.zero_grad()
        ours.zero_grad()
        assert_same(module.state_dict(), twin.state_dict())
        assert_same(ours.state_dict(), theirs.state_dict())
    return "equal" if exactly else "close"


def _trains(drawn: Drawn) -> bool:
    """Some in-place operators overwrite what the backward needs."""
    try:
        drawn.loss_fn(drawn.module(*drawn.inputs), *drawn.targets).backward()
    except RuntimeError:
        return False
    return True


def _judged(seeds: range) -> None:
    outcomes = {seed: _outcome(draw(seed), seed) for seed in seeds}
    outcomes = {seed: text for seed, text in outcomes.items() if text != "none"}
    assert len(outcomes) > 0.7 * len(seeds)
    refused = {seed: text for seed, text in outcomes.items() if text.startswith("refused")}
    assert len(refused) <= REFUSED * len(outcomes), refused
    assert sum(text == "equal" for text in outcomes.values()) > len(outcomes) / 2


def test_a_sample_of_random_modules() -> None:
    _judged(SAMPLE)


@pytest.mark.soak
def test_five_hundred_random_modules() -> None:
    _judged(ALL)
