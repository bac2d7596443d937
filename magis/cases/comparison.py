"""Compares the optimized step with eager: numbers (bit by bit, or rounding as good as its), and latency."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from magis.capture.with_optimizer import before_update, without_state
from magis.graph import Graph
from magis.ops.generators import generator_of
from magis.ops.python_objects import PREFIX, look_up
from magis.planner.subject import Subject
from magis.results import RatioInterval
from magis.runtime.double_precision import (
    RELATIVE,
    SLACK,
    closeness,
    exact,
    furthest,
    gradient_values,
    least_error,
    off_by,
    same,
    wide,
    with_gradients,
)
from magis.runtime.steps import EagerStep, Step, whole_step
from magis.runtime.time_slices import Step as TurningStep
from magis.runtime.time_slices import TimeSlice
from magis.runtime.timing import (
    ROUGHLY,
    StoppingRule,
    Timing,
    agreed,
    in_turns,
    interleave,
    is_too_busy,
    ratio_interval,
)

STEPS_COMPARED = 3
SAME, CLOSE = "bit-identical", "within tolerance"
BUFFER_SLACK = 1e-5
"""Share of a buffer's largest element by which it may differ from eager's: statistics of activations."""


def compare_by_kind(subject: Subject, graph: Graph | None, eager: Step, step: Step, seed: int) -> str:
    """Compare a step with loops (``graph``) by ``compare_rounding``, and any other one by ``compare``."""
    if graph is not None and any(op.body is not None for op in graph.ops):
        return compare_rounding(subject, graph, seed)
    return compare(eager, step, seed, shared_tensors(subject))


def compare(eager: Step, step: Step, seed: int, shared: SharedTensors | None = None) -> str:
    """Run three steps of both from the same weights and random numbers; return "bit-identical" or "differs: <what>".
    Steps have a module each; ``shared`` are other tensors that they write to."""
    return next(_step_differences(eager, step, seed, SharedTensors({}) if shared is None else shared), SAME)


def _step_differences(eager: Step, step: Step, seed: int, shared: SharedTensors) -> Iterator[str]:
    for index in range(STEPS_COMPARED):
        returned, drawn = [], []
        for each in (eager, step):
            _run_seeded(each, seed + index, shared)
            returned.append(each.results())
            drawn.append(_generator_states(each))
        if len(returned[0]) != len(returned[1]):
            yield f"differs: {len(returned[1])} results, eager has {len(returned[0])}"
        for position, (theirs, ours) in enumerate(zip(*returned, strict=True)):
            if not same(ours, theirs):
                what = "loss" if position == 0 else f"result {position}"
                yield f"differs: {what} of step {index + 1}, by up to {furthest(ours, theirs):.3g}"
        yield from (f"differs: {said} {index + 1}" for said in _moved_generators(*drawn))
    behind = f"after {STEPS_COMPARED} steps"
    for what, expected, found in (
        ("", eager.module.state_dict(), step.module.state_dict()),
        ("optimizer state ", eager.state(), step.state()),
        ("", shared.left_by(eager), shared.left_by(step)),
    ):
        yield from _differing_tensors(expected, found, f"{what}{{}} {behind}")


def _differing_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], said: str) -> Iterator[str]:
    """Yield the tensors, by name, that are not as expected."""
    yield from (f"differs: {said.format(name)}" for name in expected if not same(found[name], expected[name]))


def _seed_step(step: Step, seed: int) -> None:
    """Give the step's generators, its own too, the same random numbers to come for every step."""
    torch.manual_seed(seed)
    for number, generator in enumerate(step.generators.values(), 1):
        generator.manual_seed(seed + number)


def _generator_states(step: Step) -> dict[str, Tensor]:
    """Return the states of the generators, by what they are called in a sentence."""
    device = next((tensor.device for tensor in step.module.parameters()), "cpu")
    own = {f"generator {name!r}": generator.get_state() for name, generator in step.generators.items()}
    return {"the generator": generator_of(device).get_state(), **own}


def _moved_generators(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the generators that a step leaves in another state than eager's does."""
    yield from (f"the state of {name} after step" for name in theirs if not torch.equal(theirs[name], ours[name]))


def compare_losses(eager: Step, step: Step, seed: int, shared: SharedTensors | None = None) -> float:
    """Return the largest difference to eager's loss as a share, in three steps from the same weights and generator."""
    shared = SharedTensors({}) if shared is None else shared
    worst = 0.0
    for index in range(STEPS_COMPARED):
        theirs, ours = (float(_run_seeded(each, seed + index, shared)) for each in (eager, step))
        worst = max(worst, off_by(ours, theirs))
    return worst


def compare_rounding(subject: Subject, graph: Graph, seed: int) -> str:
    """Compare a step that sums in another order than eager: "within tolerance" or "differs: <what>".

    Loss and gradients are as close to those in float64 as eager's own are. Weights and optimizer state afterwards are,
    bit by bit, what torch's optimizer makes of these gradients; running statistics are eager's but for rounding.
    """
    return next(_differences(subject, graph, seed), CLOSE)


def _differences(subject: Subject, graph: Graph, seed: int) -> Iterator[str]:
    before, names = with_gradients(graph)
    shared = shared_tensors(subject)
    alone = subject.stopped(before_update(before))
    _run_seeded(alone, seed, shared)
    ours, left = alone.results(), _generator_states(alone)
    eager = subject.eager(stops=True)
    _run_seeded(eager, seed, shared)
    drawn = _generator_states(eager)
    gradients = eager.gradients()
    yield from _capture_differences(subject, eager, seed, shared)
    yield from _beyond_rounding(subject, names, ours, (*eager.results(), *(gradients[name] for name in names)), seed)
    full = subject.generated(graph)
    _run_seeded(full, seed, shared)
    behind = subject.captured.behind is not None  # its step may draw, and write over gradients
    yield from (f"differs: {said} 1" for said in _moved_generators(drawn, left if behind else _generator_states(full)))
    for position, (our, shipped) in enumerate(zip(ours, full.results()[: 1 if behind else None], strict=False)):
        if not same(shipped, our):
            yield f"differs: {f'result {position}' if position else 'loss'}, once the step updates its weights"
    updated = subject.captured.graded if behind else names
    found = dict(zip(updated, ours[len(ours) - len(updated) :], strict=True))
    with shared.within(None):
        yield from _update_differences(subject, found, full, seed, drawn["the generator"])
    buffers = {**dict(eager.module.named_buffers()), **shared.left_by(eager)}
    for name, tensor in {**dict(full.module.named_buffers()), **shared.left_by(full)}.items():
        if same(tensor, buffers[name]):
            continue
        error = furthest(tensor, buffers[name])
        if not error <= BUFFER_SLACK * wide(buffers[name]).abs().max().item():
            yield f"differs: buffer {name}, by up to {error:.3g}"


def _capture_differences(subject: Subject, eager: EagerStep, seed: int, shared: SharedTensors) -> Iterator[str]:
    """Yield a difference for each result of the captured step, run as it is, that is not eager's."""
    graph, names = with_gradients(subject.captured.graph)
    step = subject.stopped(before_update(graph))
    _run_seeded(step, seed, shared)
    theirs = (*eager.results(), *(eager.gradients()[name] for name in names))
    for our, their in zip(step.results(), theirs, strict=True):
        if not torch.equal(our, their):
            yield "differs: the captured step"


def _run_seeded(step: Step, seed: int, shared: SharedTensors) -> Tensor:
    """Run one step with these random numbers, on what it left in ``shared``; return its loss."""
    _seed_step(step, seed)
    with shared.within(step):
        step.prepare()
        return step.run()


def _beyond_rounding(
    subject: Subject, names: Sequence[str], ours: Sequence[Tensor], theirs: Sequence[Tensor], seed: int
) -> Iterator[str]:
    """Yield results and gradients that are further from the exact ones than rounding explains."""
    captured = subject.captured.graph if subject.captured.behind is None else without_state(subject.captured.graph)
    values = gradient_values(captured)
    wanted = [*captured.outputs, *(values[name] for name in names)]
    if not len(ours) == len(theirs) == len(wanted):
        yield f"differs: {len(ours)} results, eager has {len(theirs)}"
        return
    same = subject.stopped(captured)
    _seed_step(same, seed)
    reference, terms = exact(captured, same.tensors, wanted, same.generators, same.numbers())
    relative = least_error(captured)
    results = [f"result {index}" if index else "loss" for index in range(len(captured.outputs))]
    corners = _Corners(subject, names, reference, seed)
    rows = zip([*results, *names], ours, theirs, reference, terms, strict=True)
    for position, (name, our, their, right, summed) in enumerate(rows):
        least = relative if our.numel() == 1 else RELATIVE
        found = closeness(name, our, their, right, least, summed)
        fine = position >= len(results) and torch.finfo(our.dtype).eps < FINE
        while fine and found.share > 1.0 and (position in corners.worst or corners.look_on()):
            excused = (wide(our) - right).abs() <= SLACK * corners.worst[position]
            found = closeness(name, torch.where(excused, their, our), their, right, least, summed)
            if found.share > 1.0 and not corners.look_on():
                break
        if found.share > 1.0:
            what = name if name in results else f"gradient of {name}"
            yield f"differs: {what} is {found.share:.3g} times as far off as rounding allows"


FINE = 1e-5
"""Types of a coarser epsilon round by more than corners move."""
NEARBY = 8
"""Steps of eager with other last bits that are looked at together. In half of them a corner within rounding is on its
other side."""
MOST_NEARBY = 32
"""Where many corners are near: the worst that several of them do to an element together shows in few steps."""


@dataclass
class _Corners:
    """Largest error of each element of eager's gradients where weights may be off in the last bit.

    A step has corners: a ReLU's input near zero, two elements of a pool that are nearly equal. On which side rounding
    puts such an element moves a gradient by far more than rounding itself, in eager as in any other order of sums.
    """

    subject: Subject
    names: Sequence[str]
    reference: Sequence[Tensor]
    seed: int
    worst: dict[int, Tensor] = field(default_factory=dict)
    """Largest errors in the steps so far, by position among results and gradients."""
    steps: int = 0

    def look_on(self) -> bool:
        """Look at more steps; False where these were enough."""
        if self.steps >= MOST_NEARBY:
            return False
        shared, first = shared_tensors(self.subject), len(self.reference) - len(self.names)
        for number in range(self.steps, self.steps + NEARBY):
            eager = self.subject.eager(stops=True)
            _perturb_weights(eager, number)
            _run_seeded(eager, self.seed, shared)
            gradients = eager.gradients()
            for position, name in enumerate(self.names, first):
                off = (wide(gradients[name]) - self.reference[position]).abs().nan_to_num(0.0, 0.0, 0.0)
                self.worst[position] = torch.maximum(self.worst.get(position, off), off)
        self.steps += NEARBY
        return True


def _perturb_weights(step: EagerStep, number: int) -> None:
    """Change the last bits of a step's weights at random; ``number`` is the seed."""
    bits = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for each in step.module.parameters():
            if each.is_floating_point() or each.is_complex():
                up_or_down = 2 * torch.rand(each.shape, generator=bits, dtype=torch.float64) - 1
                each.mul_((1 + torch.finfo(each.dtype).eps / 2 * up_or_down).to(each.device))


def _update_differences(
    subject: Subject, gradients: dict[str, Tensor], step: Step, seed: int, drawn: Tensor
) -> Iterator[str]:
    """Yield what torch's optimizer makes otherwise of the same gradients and of the weights after a forward.

    ``drawn`` is the generator's state behind the backward.
    """
    if not gradients:
        return
    twin = subject.eager()
    _seed_step(twin, seed)
    twin.prepare()
    twin.forward()
    generator_of(subject.torch_device).set_state(drawn)
    twin.update(gradients)
    weights, theirs = (dict(each.module.named_parameters()) for each in (step, twin))
    yield from _differing_tensors(theirs, weights, "{} after the step, by the same gradient")
    yield from _differing_tensors(
        twin.state(), step.state(), "optimizer state {} after the step, by the same gradients"
    )


# The latency ratio of a case: two looks at it, of steps that are made anew for each.

TIMING_ROUNDS = 8
"""Number of pairs in a look, to start with."""
ROUNDS_WHOLE = 3
SHORTEST_MS = 30.0
"""Milliseconds of the shortest step that takes turns, ten slices: in shorter ones the ratio shows what turns cost."""
WARM_UP = 1
"""Untimed pairs before the others."""


@dataclass(frozen=True)
class TimingLook:
    """Pairs of whole steps, for the milliseconds, and those for the ratio; they may be the same."""

    whole: Timing
    pairs: Timing


@dataclass(frozen=True)
class TimingLooks:
    """Looks at the ratio of a case's two steps, each of steps made anew, and the ratio that they agree on.

    ``rounds`` pairs to start with; ``bounds`` are the ratios at which the verdict changes. A ``rough`` ratio is only
    shown, and is worth one short look. ``turning`` steps can take turns.
    """

    device: torch.device
    rounds: int
    bounds: tuple[float, ...] = ()
    rough: bool = False
    turning: bool = False

    def look(self, eager: Step, step: Step) -> TimingLook:
        """Time both steps: whole or, where they can and are long enough, in turns."""
        whole = partial(interleave, whole_step(eager), whole_step(step), warmup=WARM_UP, device=self.device)
        if self.rough:
            timing = whole(ROUGHLY)
            return TimingLook(timing, timing)
        patience = StoppingRule(self.rounds, self.bounds)
        if self.turning:
            some = whole(StoppingRule(min(self.rounds, ROUNDS_WHOLE), most=0))
            if min(some.first_ms) >= SHORTEST_MS:
                return TimingLook(some, in_turns(once_in_turns(eager), once_in_turns(step), patience))
        timing = whole(patience)
        return TimingLook(timing, timing)

    def wants_another(self, look: TimingLook) -> bool:
        """Return True if a second look would tell something."""
        return not self.rough and not is_too_busy(look.pairs)

    def ratio(self, found: Sequence[TimingLook]) -> RatioInterval:
        """Return the ratio that the looks, at most two, say together."""
        if self.rough:
            return ratio_interval(found[0].pairs)
        second = found[1].pairs if len(found) > 1 else None
        return agreed(found[0].pairs, second, self.bounds)


def once_in_turns(step: Step) -> TurningStep:
    """Return a call of the whole step that takes turns, as `whole_step` does for one that does not."""

    def once(turn: TimeSlice) -> object:
        step.prepare()
        return step.run_in_turns(turn)

    return once


# Tensors that a step writes beside its module's: counts of a loss, what a hook adds up in a closure, a global.
# Modules and batches are copied for each step, these are not. Steps that are compared find what they left there
# themselves, as if they ran alone.


class SharedTensors:
    """Contents of ``tensors`` as each step that runs `within` leaves them.

    A step's first run begins with what was there at the start.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._first = _copies(tensors)
        self._left: dict[object, dict[str, Tensor]] = {}

    @contextmanager
    def within(self, step: object) -> Iterator[None]:
        """Give ``step`` its own contents for the block, and put those of the start back behind it."""
        self._fill(self.left_by(step))
        try:
            yield
            self._left[step] = _copies(self._tensors)
        finally:
            self._fill(self._first)

    def left_by(self, step: object) -> dict[str, Tensor]:
        """Return the contents by name, as the last block of ``step`` left them."""
        return self._left.get(step, self._first)

    def _fill(self, contents: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(contents[name])


def shared_tensors(subject: Subject) -> SharedTensors:
    """Return the tensors that the subject's step writes and its modules do not own."""
    (graph, cached), holders = (subject.captured.graph, subject.captured.cached), subject.holders
    written = {storage for op in graph.ops for storage, _ in op.writes}
    names = (value.name for value in map(graph.values.__getitem__, graph.inputs) if value.storage in written)
    return SharedTensors(
        {
            name: cached[name] if name in cached else look_up(holders, name)
            for name in names
            if name in cached or name.startswith(PREFIX)
        }
    )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
