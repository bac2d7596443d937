"""Smaller versions of a step, whose run takes bounded memory and time, predicted before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from magis.capture import Captured, Workload
from magis.capture.contents import hollow_like, is_hollow
from magis.cost.cost_model import RooflineCosts
from magis.cost.devices import CPU
from magis.errors import MagisError
from magis.graph import Graph
from magis.ops.collectives import is_message
from magis.simulate.simulator import replay

MOST_BYTES = 3 << 28
"""Largest peak of a step that is run only to look at it."""
MOST_SECONDS = 5.0
"""Longest predicted time of such a step."""
FEW = 2
"""Samples of a smaller step, and blocks of a kind."""
LEAST_LENGTH = 16
"""Shortest dimension that may be a length; shorter ones are channels, say."""
MOST_TRIES = 16
"""Most captures of smaller steps, any of which may fail: a width is no length."""
COSTS = RooflineCosts(CPU)


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A step, its capture for the CPU, and the bytes and seconds that running it there takes."""

    work: Workload
    captured: Captured
    nbytes: int
    seconds: float
    said: str = ""
    """Description of what is smaller: "batch of 2, 512 of 65536"."""


def seconds_on_cpu(graph: Graph) -> float:
    """Return the seconds of a graph on a small CPU, predicted from its operators."""
    return sum(COSTS.nanoseconds(op, graph.values) for op in graph.ops if not is_message(op.target)) / 1e9


def sized(work: Workload, captured: Captured, said: str = "") -> SizedStep:
    """Predict what running a captured step takes, on a copy of its tensors beside those that are there already."""
    graph = captured.graph
    peak = replay(graph, COSTS.workspace, deaths=captured.deaths, rounding=COSTS.rounding).peak_bytes
    there = held_bytes(tensor for tensor in tensors_of(work) if not is_hollow(tensor))
    return SizedStep(work, captured, peak + there, seconds_on_cpu(graph), said)


def tensors_of(work: Workload) -> tuple[Tensor, ...]:
    """Return parameters, buffers and batch."""
    return (*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each as if it lay by itself."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def smaller_step(
    work: Workload,
    capture: Callable[[Workload], Captured],
    *,
    most_bytes: int = MOST_BYTES,
    most_seconds: float = MOST_SECONDS,
) -> Iterator[SizedStep | None]:
    """Give the block a smaller step that takes at most so many bytes and seconds; None if none is found.

    The batch gets two samples; its lengths (of sequences, pictures) shrink; of equal sub-modules in a row, two stay,
    where they are ours alone to take apart, to the end of the block. A smaller step is one that can be captured:
    dimensions of one extent shrink together, with those of a multiple of it (flat targets) and of one more or less
    (shifted ones).
    """
    rule = replace(work.optimizer, kind="gradients", groups=(), own=None)
    with ExitStack() as undone:
        yield _Shrinking(replace(work, optimizer=rule), capture, most_bytes, most_seconds, undone).found()


class _Shrinking:
    """A step on the way to a smaller one."""

    def __init__(
        self,
        work: Workload,
        capture: Callable[[Workload], Captured],
        most_bytes: int,
        most_seconds: float,
        undone: ExitStack,
    ) -> None:
        self._work, self._capture, self._undone = work, capture, undone
        self._most_bytes, self._most_seconds = most_bytes, most_seconds
        self._step: SizedStep | None = None
        self._tries = 0

    def found(self) -> SizedStep | None:
        blocks = ""
        if self._weight_bytes > self._most_bytes:
            blocks = self._fewer_blocks()
            if self._weight_bytes > self._most_bytes:
                return None
        batch = next((tensor.shape[0] for tensor in self._batch if tensor.dim()), 0)
        samples = FEW if batch > FEW and self._try_resize(batch, FEW) else batch
        if self._step is None and not self._try_capture(self._work):
            return None
        lengths = {size for tensor in self._batch for size in tensor.shape if size > LEAST_LENGTH} - {samples}
        shrunk = {length: self._shorten(length) for length in sorted(lengths, reverse=True)}
        if not self._fits and samples > 1 and self._try_resize(samples, 1):
            samples = 1
        if not self._fits and not blocks:
            blocks = self._fewer_blocks()
            self._try_capture(self._work)
        if self._step is None or not self._fits:
            return None
        parts = [f"batch of {samples}"] if samples < batch else []
        parts += [f"{size} of {length}" for length, size in shrunk.items() if size < length]
        return replace(self._step, said=", ".join([*parts, blocks] if blocks else parts))

    @property
    def _batch(self) -> tuple[Tensor, ...]:
        return (*self._work.inputs, *self._work.targets)

    @property
    def _weight_bytes(self) -> int:
        """Bytes of the parameters as they are run: copies and gradients, beside real ones."""
        return sum((2 if is_hollow(p) else 3) * held_bytes([p]) for p in self._work.module.parameters())

    @property
    def _times_too_large(self) -> float:
        """Factor by which the batch makes the step too large; at most 1 where the step fits."""
        if self._step is None:
            return math.inf
        room = max(1, self._most_bytes - self._weight_bytes)
        return max((self._step.nbytes - self._weight_bytes) / room, self._step.seconds / self._most_seconds)

    @property
    def _fits(self) -> bool:
        return self._times_too_large <= 1

    def _shorten(self, length: int) -> int:
        """Shorten dimensions of a length by halves, as far as the step needs it; return the length then."""
        while not self._fits and length > LEAST_LENGTH:
            over = min(self._times_too_large, float(length))
            halvings = max(1, math.ceil(math.log2(over)))
            sizes = {max(length >> times, LEAST_LENGTH) for times in (halvings, halvings - 2, 1) if times > 0}
            found = next((size for size in sorted(sizes) if self._try_resize(length, size)), None)
            if found is None:
                break
            length = found
        return length

    def _try_resize(self, length: int, size: int) -> bool:
        """Give the batch's dimensions of a length another one; return True if that is a step."""
        lengths = {each for tensor in self._batch for each in tensor.shape}

        def other(extent: int) -> int:
            if abs(extent - length) <= 1:
                return max(1, extent - length + size)
            times, rest = divmod(extent, length)
            return times * size if not rest and times in lengths else extent

        def cut(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(_first_elements(tensor, tuple(map(other, tensor.shape))) for tensor in tensors)

        return self._try_capture(replace(self._work, inputs=cut(self._work.inputs), targets=cut(self._work.targets)))

    def _try_capture(self, work: Workload) -> bool:
        """Capture a workload, and go on from it; return True if it is a step."""
        self._tries += 1
        if self._tries > MOST_TRIES:
            return False
        try:
            captured = self._capture(work)
        except MagisError:
            return False
        self._work, self._step = work, sized(work, captured)
        return True

    def _fewer_blocks(self) -> str:
        """Leave two of the equal sub-modules in every row of them, to the end of the block; say of how many."""
        most = 0
        for container in [*self._work.module.modules()]:
            listed = isinstance(container, nn.ModuleList)
            ours = any(map(is_hollow, container.parameters()))
            if not ours or not (listed or isinstance(container, nn.Sequential)):
                continue
            rows = [
                [*row] for _, row in groupby(container.named_children(), key=lambda child: _form_of_block(child[1]))
            ]
            kept = [child for row in rows for child in (row[:FEW] if _form_of_block(row[0][1])[1] else row)]
            if len(kept) < sum(map(len, rows)):
                most = max(most, *map(len, rows))
                self._undone.callback(vars(container).update, _modules=vars(container)["_modules"])
                fewer = {str(number) if listed else name: module for number, (name, module) in enumerate(kept)}
                vars(container).update(_modules=fewer)
        return f"{FEW} of {most} blocks" if most else ""


def _form_of_block(module: nn.Module) -> tuple[object, ...]:
    """Return what equal sub-modules have in common: class, and parameters by name and shape."""
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


def _first_elements(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the first elements along each dimension; hollow, of a hollow one."""
    if shape == tensor.shape:
        return tensor
    if is_hollow(tensor):
        like = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return hollow_like({"": like}, lambda _name, _tensor: False)[""]
    with torch.no_grad():
        return tensor[tuple(map(slice, shape))].clone()
