"""Smaller versions of a step, which run within bounded memory and time, predicted before anything runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
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
"""Largest peak of a step that runs only for inspection."""
MOST_SECONDS = 5.0
"""Longest predicted time of a step that runs only for inspection."""
FEW = 2
"""Batch size of a smaller step, and blocks that stay of each run of equal ones."""
LEAST_LENGTH = 16
"""Smallest size to which a dimension is shortened; smaller dimensions may be channels."""
MOST_TRIES = 24
"""Most captures of smaller steps. Each may fail, since a dimension may be a feature size that cannot be shortened."""
COSTS = RooflineCosts(CPU)
BROADCAST = "Using a target size"
"""Start of the warning of torch's losses that prediction and target, of different sizes, are broadcast."""


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A step, its capture for the CPU, and the bytes and seconds that it needs there."""

    work: Workload
    captured: Captured
    nbytes: int
    seconds: float
    said: str = ""
    """Description of the smaller sizes: "batch of 2, 512 of 65536"."""


def seconds_on_cpu(graph: Graph) -> float:
    """Return the predicted seconds of a graph on a small CPU, from its operators."""
    return sum(COSTS.nanoseconds(op, graph.values) for op in graph.ops if not is_message(op.target)) / 1e9


def sized(work: Workload, captured: Captured, said: str = "") -> SizedStep:
    """Predict the bytes and seconds of running a captured step on copies of its tensors."""
    graph = captured.graph
    peak = replay(graph, COSTS.workspace, deaths=captured.deaths, rounding=COSTS.rounding).peak_bytes
    there = held_bytes(tensor for tensor in tensors_of(work) if not is_hollow(tensor))
    return SizedStep(work, captured, peak + there, seconds_on_cpu(graph), said)


def tensors_of(work: Workload) -> tuple[Tensor, ...]:
    """Return parameters, buffers and batch."""
    return (*work.module.parameters(), *work.module.buffers(), *work.inputs, *work.targets)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors, without regard to shared storage."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def smaller_step(
    work: Workload,
    capture: Callable[[Workload], Captured],
    *,
    most_bytes: int = MOST_BYTES,
    most_seconds: float = MOST_SECONDS,
) -> Iterator[SizedStep | None]:
    """Yield a smaller version of a step within the given bytes and seconds; None if none is found.

    The batch size becomes two; other batch dimensions (sequence length, image size) shrink; of equal consecutive
    sub-modules two stay until the block ends, if the module is hollow. Dimensions of equal size shrink together, with
    their multiples (flattened targets), those that differ by one (shifted targets), and areas (patches), as long as
    capture succeeds.
    """
    rule = replace(work.optimizer, kind="gradients", groups=(), own=None)
    with ExitStack() as undone:
        yield _Shrinking(replace(work, optimizer=rule), capture, most_bytes, most_seconds, undone).found()


class _Shrinking:
    """State of the search for a smaller step."""

    def __init__(
        self,
        work: Workload,
        capture: Callable[[Workload], Captured],
        most_bytes: int,
        most_seconds: float,
        undone: ExitStack,
    ) -> None:
        self._work, self._capture, self._undone = work, capture, undone
        self._given = work
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
        order = sorted(lengths, key=lambda length: (length in self._features, -length))
        shrunk = {length: self._shorten(length) for length in order}
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

    @cached_property
    def _features(self) -> frozenset[int]:
        """Sizes of the parameters' dimensions."""
        return frozenset(size for parameter in self._work.module.parameters() for size in parameter.shape)

    @property
    def _weight_bytes(self) -> int:
        """Bytes of parameter copies and gradients, and of the real parameters themselves."""
        return sum((2 if is_hollow(p) else 3) * held_bytes([p]) for p in self._work.module.parameters())

    @property
    def _times_too_large(self) -> float:
        """Factor by which the step exceeds its bytes or seconds; at most 1 where it fits."""
        if self._step is None:
            return math.inf
        room = max(1, self._most_bytes - self._weight_bytes)
        return max((self._step.nbytes - self._weight_bytes) / room, self._step.seconds / self._most_seconds)

    @property
    def _fits(self) -> bool:
        return self._times_too_large <= 1

    def _shorten(self, length: int) -> int:
        """Halve the batch dimensions of a size until the step fits; return the new size."""
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
        """Resize the batch dimensions of one size; return True if capture then succeeds. Dimensions that may be areas
        stay at first, and so do those that may be features."""
        lengths = {each for tensor in self._batch for each in tensor.shape}

        def other(extent: int, areas: bool, stays: frozenset[int]) -> int:
            if extent in stays and extent != length:
                return extent
            if abs(extent - length) <= 1:
                return max(1, extent - length + size)
            times, rest = divmod(extent, length)
            if not rest and times in lengths:
                return times * size
            whole, area = length * length, size * size
            patches = areas and extent > length and not (whole % extent and extent % whole)
            return max(1, extent * area // whole) if patches else extent

        known = set[tuple[torch.Size, ...]]()
        for areas, stays in ((False, self._features), (True, self._features), (False, frozenset[int]())):
            inputs, targets = (
                tuple(
                    _first_elements(each, tuple(other(extent, areas, stays) for extent in each.shape)) for each in some
                )
                for some in (self._work.inputs, self._work.targets)
            )
            sizes = tuple(each.shape for each in (*inputs, *targets))
            if sizes not in known and self._try_capture(replace(self._work, inputs=inputs, targets=targets)):
                return True
            known.add(sizes)
        return False

    def _try_capture(self, work: Workload) -> bool:
        """Capture a workload and keep it as the current step; return False if capture fails."""
        self._tries += 1
        if self._tries > MOST_TRIES:
            return False
        try:
            captured, broadcasts = self._captured(work)
        except MagisError:
            return False
        if broadcasts and not self._broadcasts:
            return False
        self._work, self._step = work, sized(work, captured)
        return True

    def _captured(self, work: Workload) -> tuple[Captured, bool]:
        """Capture a workload, without warnings of sizes that nobody asked for; return True if targets are broadcast."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            captured = self._capture(work)
        return captured, any(str(each.message).startswith(BROADCAST) for each in told)

    @cached_property
    def _broadcasts(self) -> bool:
        """True if the step that was given broadcasts its targets, too."""
        return self._captured(self._given)[1]

    def _fewer_blocks(self) -> str:
        """Keep two of every run of equal sub-modules until the block ends; return a description, empty if none is
        removed."""
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
    """Return the class of a module, and name, shape and dtype of its parameters: equal blocks have equal ones."""
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


def _first_elements(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor cut to a shape from its start, hollow if the tensor is."""
    if shape == tensor.shape:
        return tensor
    if is_hollow(tensor):
        like = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return hollow_like({"": like}, lambda _name, _tensor: False)[""]
    with torch.no_grad():
        return tensor[tuple(map(slice, shape))].clone()
