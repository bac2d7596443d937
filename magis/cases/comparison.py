"""Comparison of the optimized step with eager: numbers (bitwise, or within rounding), and latency."""

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
"""Tolerance of a buffer, relative to its largest element: buffers are statistics of activations."""


def compare_by_kind(subject: Subject, graph: Graph | None, eager: Step, step: Step, seed: int) -> str:
    """Compare a step with eager: by ``compare_rounding`` if ``graph`` has loops, else by ``compare``."""
    if graph is not None and any(op.body is not None for op in graph.ops):
        return compare_rounding(subject, graph, seed)
    return compare(eager, step, seed, shared_tensors(subject))


def compare(eager: Step, step: Step, seed: int, shared: SharedTensors | None = None) -> str:
    """Run three steps of eager and of the step, from equal weights and random states; return "bit-identical" or
    "differs: ...". Each step has its own module; ``shared`` are other tensors that both write."""
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
    """Yield a difference for each tensor, by name, that is not as expected."""
    yield from (f"differs: {said.format(name)}" for name in expected if not same(found[name], expected[name]))


def _seed_step(step: Step, seed: int) -> None:
    """Seed the default generators and the step's own."""
    torch.manual_seed(seed)
    for number, generator in enumerate(step.generators.values(), 1):
        generator.manual_seed(seed + number)


def _generator_states(step: Step) -> dict[str, Tensor]:
    """Return the states of the default and the step's own generators, by readable name."""
    device = next((tensor.device for tensor in step.module.parameters()), "cpu")
    own = {f"generator {name!r}": generator.get_state() for name, generator in step.generators.items()}
    return {"the generator": generator_of(device).get_state(), **own}


def _moved_generators(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the generators whose states after a step differ from eager's."""
    yield from (f"the state of {name} after step" for name in theirs if not torch.equal(theirs[name], ours[name]))


def compare_losses(eager: Step, step: Step, seed: int, shared: SharedTensors | None = None) -> float:
    """Return the largest relative difference of the losses over three steps from equal weights and random states."""
    shared = SharedTensors({}) if shared is None else shared
    worst = 0.0
    for index in range(STEPS_COMPARED):
        theirs, ours = (float(_run_seeded(each, seed + index, shared)) for each in (eager, step))
        worst = max(worst, off_by(ours, theirs))
    return worst


def compare_rounding(subject: Subject, graph: Graph, seed: int) -> str:
    """Compare a step with another order of sums than eager's: return "within tolerance" or "differs: <what>".

    Loss and gradients must be as close to float64 as eager's are. Weights and optimizer state afterwards must equal,
    bit by bit, those of torch's optimizer with these gradients; running statistics must equal eager's within rounding.
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
    behind = subject.captured.behind is not None  # its step may draw random numbers and overwrite gradients
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
    """Yield a difference for each result of the captured step, run unchanged, that differs from eager's."""
    graph, names = with_gradients(subject.captured.graph)
    step = subject.stopped(before_update(graph))
    _run_seeded(step, seed, shared)
    theirs = (*eager.results(), *(eager.gradients()[name] for name in names))
    for our, their in zip(step.results(), theirs, strict=True):
        if not torch.equal(our, their):
            yield "differs: the captured step"


def _run_seeded(step: Step, seed: int, shared: SharedTensors) -> Tensor:
    """Run one step with this seed, with the shared tensors as its last run left them; return its loss."""
    _seed_step(step, seed)
    with shared.within(step):
        step.prepare()
        return step.run()


def _beyond_rounding(
    subject: Subject, names: Sequence[str], ours: Sequence[Tensor], theirs: Sequence[Tensor], seed: int
) -> Iterator[str]:
    """Yield results and gradients whose error against float64 exceeds rounding."""
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
"""Epsilon of a dtype from which on rounding exceeds the effect of kinks."""
NEARBY = 8
"""Number of perturbed eager steps per batch of steps; half of them move an element near a kink to its other side."""
MOST_NEARBY = 32
"""Maximum number of perturbed eager steps: with many kinks nearby, few steps show the worst of several at once."""


@dataclass
class _Corners:
    """Largest error of each element of eager's gradients if weights are perturbed in the last bit.

    A step has kinks: a ReLU's input near zero, two elements of a max pool that are nearly equal. Rounding decides on
    which side such an element is, which moves a gradient by far more than rounding, in eager as in any other order of
    sums.
    """

    subject: Subject
    names: Sequence[str]
    reference: Sequence[Tensor]
    seed: int
    worst: dict[int, Tensor] = field(default_factory=dict)
    """Largest errors so far, by position among results and gradients."""
    steps: int = 0

    def look_on(self) -> bool:
        """Run another batch of perturbed steps; return False if the maximum was reached before."""
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
    """Perturb the last bits of a step's weights at random; ``number`` is the seed."""
    bits = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for each in step.module.parameters():
            if each.is_floating_point() or each.is_complex():
                up_or_down = 2 * torch.rand(each.shape, generator=bits, dtype=torch.float64) - 1
                each.mul_((1 + torch.finfo(each.dtype).eps / 2 * up_or_down).to(each.device))


def _update_differences(
    subject: Subject, gradients: dict[str, Tensor], step: Step, seed: int, drawn: Tensor
) -> Iterator[str]:
    """Yield weights and optimizer state that differ from those of torch's optimizer with the given gradients.

    ``drawn`` is the generator's state after the backward.
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


# The latency ratio of a case, measured twice with newly built steps.

TIMING_ROUNDS = 8
"""Initial number of pairs in a measurement."""
ROUNDS_WHOLE = 3
SHORTEST_MS = 30.0
"""Minimum milliseconds of a step for interleaved time slices (ten slices): below, switching distorts the ratio."""
WARM_UP = 1
"""Number of untimed warm-up pairs."""


@dataclass(frozen=True)
class TimingLook:
    """One measurement: pairs of whole steps, for milliseconds, and pairs for the ratio; they may be equal."""

    whole: Timing
    pairs: Timing


@dataclass(frozen=True)
class TimingLooks:
    """Measurement of the latency ratio of a case's two steps, once or twice, and the ratio on which both agree.

    ``rounds`` is the initial number of pairs; ``bounds`` are the ratios at which the verdict changes. A ``rough`` ratio
    is only shown, and measured once and briefly. ``turning`` steps support time slices.
    """

    device: torch.device
    rounds: int
    bounds: tuple[float, ...] = ()
    rough: bool = False
    turning: bool = False

    def look(self, eager: Step, step: Step) -> TimingLook:
        """Return one measurement of both steps: whole steps, or time slices if supported and the steps are long
        enough."""
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
        """Return True if a second measurement is useful."""
        return not self.rough and not is_too_busy(look.pairs)

    def ratio(self, found: Sequence[TimingLook]) -> RatioInterval:
        """Return the ratio on which the measurements, at most two, agree."""
        if self.rough:
            return ratio_interval(found[0].pairs)
        second = found[1].pairs if len(found) > 1 else None
        return agreed(found[0].pairs, second, self.bounds)


def once_in_turns(step: Step) -> TurningStep:
    """Return a function that runs the whole step in time slices, as `whole_step` does without."""

    def once(turn: TimeSlice) -> object:
        step.prepare()
        return step.run_in_turns(turn)

    return once


# Tensors that a step writes besides its module's: counts of a loss, a sum of a hook in a closure, a global. Modules and
# batches are copied for each step, these tensors are not. Compared steps must find their own contents, as if each ran
# alone.


class SharedTensors:
    """Per-step contents of shared tensors: each step that runs `within` finds what it left.

    A step's first run finds the initial contents.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._first = _copies(tensors)
        self._left: dict[object, dict[str, Tensor]] = {}

    @contextmanager
    def within(self, step: object) -> Iterator[None]:
        """Set the tensors, for the block, to the contents that ``step`` left; afterwards to the initial contents."""
        self._fill(self.left_by(step))
        try:
            yield
            self._left[step] = _copies(self._tensors)
        finally:
            self._fill(self._first)

    def left_by(self, step: object) -> dict[str, Tensor]:
        """Return the contents by name after the last block of ``step``."""
        return self._left.get(step, self._first)

    def _fill(self, contents: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(contents[name])


def shared_tensors(subject: Subject) -> SharedTensors:
    """Return the tensors that the subject's step writes and that its module does not own."""
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
