"""A device with streams that exists on paper: what it is given is recorded, judged, and run again in any legal order.

While the recording runs, every operator is done at once, as on a CPU. What the streams were given can then be

* *judged* (``races``): two streams touch the same memory, one of them writes it, and no event orders the two;
* *run again* (``run_again``): each stream does what it was given in order, as early or as late as its events allow.

Memory is as unkind as the rules allow: fresh memory holds rubbish that the compute stream leaves there as it is
allocated (its last owner's operators may not have run yet), and rubbish once more as soon as it is freed (its next
owner's will).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from magis.runtime.swap_streams import as_bytes

RUBBISH = 0xAB
COMPUTE = 0


@dataclass(frozen=True)
class Window:
    """A tensor of the recording: memory by number, and a look at it."""

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, memories: Mapping[int, torch.UntypedStorage]) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(memories[self.memory], self.offset, self.shape, self.stride)  # type: ignore[call-overload]


Run = Callable[[Mapping[int, torch.UntypedStorage]], None]


@dataclass(frozen=True, eq=False)
class Action:
    """Something that a stream was given."""

    stream: int
    what: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    records: int | None = None
    awaits: int | None = None
    run: Run | None = None


@dataclass(frozen=True)
class Stream:
    """A stream of the paper device."""

    gpu: SimulatedGpu
    number: int

    def record_event(self) -> int:
        event = self.gpu.events = self.gpu.events + 1
        self.gpu.give(Action(self.number, f"event {event}", records=event))
        return event

    def wait_event(self, event: int) -> None:
        self.gpu.give(Action(self.number, f"wait for event {event}", awaits=event))


@dataclass
class _Known:
    reference: StorageWeakRef
    number: int
    pinned: bool


@dataclass(eq=False)
class SimulatedGpu(TorchDispatchMode):
    """Records while it is entered; the runtime of a ``StreamHost`` besides."""

    actions: list[Action] = field(default_factory=list)
    events: int = 0
    streams: int = 1
    current: int = COMPUTE
    pinned_bytes: list[int] = field(default_factory=list)
    memories: dict[int, bytes] = field(default_factory=dict)
    """What every memory holds before anything runs."""
    _known: dict[int, _Known] = field(default_factory=dict)
    _ends: dict[int, int] = field(default_factory=dict)
    """First byte of each memory behind all that was ever looked at."""
    _count: int = 0
    _indices: set[int] = field(default_factory=set)
    """Memories of whole numbers: rubbish there is 0, which kernels that look things up survive."""

    def __post_init__(self) -> None:
        super().__init__()

    # -- the runtime ------------------------------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        return Stream(self, self.current)

    def new_stream(self) -> Stream:
        self.streams += 1
        return Stream(self, self.streams - 1)

    @contextmanager
    def running_on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.number
        try:
            yield
        finally:
            self.current = before

    def pinned(self, nbytes: int) -> Tensor:
        made = torch.full((nbytes,), RUBBISH, dtype=torch.uint8)
        self.pinned_bytes.append(nbytes)
        self._meet(made, pinned=True)
        return made

    def note_pinned(self) -> None:
        """Keep what pinned memory holds before anything runs."""
        for known in self._known.values():
            if known.pinned:
                storage = torch.UntypedStorage._new_with_weak_ptr(known.reference.cdata)
                self.memories[known.number] = _content(storage)

    def give(self, action: Action) -> None:
        self._sweep()
        self.actions.append(action)

    # -- recording --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._sweep()
        kwargs = dict(kwargs or {})
        given = {self._meet(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        windows = tree_map(self._window, (args, kwargs))
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = set()
        for tensor in made:
            if self._number(tensor) is None:
                fresh.add(self._meet(tensor, fresh=True))
        for number in sorted(fresh):
            self._spoil(number, f"allocate {number}")
        writes = _written(func, args, kwargs, self) | fresh
        if writes:
            outputs = [self._window(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(result)]
            run = _again(func, windows, outputs, fresh, state)
            self.actions.append(Action(self.current, str(func), frozenset(given), frozenset(writes), run=run))
        return result

    def _number(self, tensor: Tensor) -> int | None:
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known.number

    def _meet(self, tensor: Tensor, *, pinned: bool = False, fresh: bool = False) -> int:
        """The number of a tensor's memory; what it holds is kept where it existed before the recording."""
        known = self._number(tensor)
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        self._count += 1
        if not (pinned or tensor.is_floating_point()):
            self._indices.add(self._count)
        self._known[storage._cdata] = _Known(StorageWeakRef(storage), self._count, pinned)
        self.memories[self._count] = bytes([RUBBISH]) * storage.nbytes() if fresh else _content(storage)
        return self._count

    def _window(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        number = self._meet(leaf)
        end = (leaf.storage_offset() + as_bytes(leaf).numel() // leaf.element_size()) * leaf.element_size()
        self._ends[number] = max(end, self._ends.get(number, 0))
        return Window(number, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset())

    def _sweep(self) -> None:
        """Memory that was freed since the last call belongs to whatever the compute stream is given next."""
        for key, known in list(self._known.items()):
            if known.reference.expired():
                del self._known[key]
                if not known.pinned:
                    self._spoil(known.number, f"free {known.number}")

    def _spoil(self, number: int, what: str) -> None:
        def run(memories: Mapping[int, torch.UntypedStorage]) -> None:
            memories[number].fill_(0 if number in self._indices else RUBBISH)

        self.actions.append(Action(COMPUTE, what, writes=frozenset([number]), run=run))

    # -- what came of it --------------------------------------------------------------------------------------------

    def races(self) -> list[str]:
        """Accesses of two streams to one memory, at least one of them a write, that no event orders."""
        found = []
        clocks = [[0] * self.streams for _ in range(self.streams)]
        events: dict[int, list[int]] = {}
        accesses: dict[int, list[tuple[Action, int]]] = {}
        for action in self.actions:
            clock = clocks[action.stream]
            clock[action.stream] += 1
            if action.awaits is not None:
                clock[:] = map(max, clock, events[action.awaits])
            if action.records is not None:
                events[action.records] = list(clock)
            for memory in sorted(action.reads | action.writes):
                for earlier, time in accesses.setdefault(memory, []):
                    writes = memory in earlier.writes or memory in action.writes
                    if earlier.stream != action.stream and writes and clock[earlier.stream] < time:
                        found.append(f"{earlier.what} on stream {earlier.stream}, {action.what} on {action.stream}")
                accesses[memory].append((action, clock[action.stream]))
        return found

    def alive(self) -> dict[int, bytes]:
        """What all memory of the device that is still in use holds now."""
        with _disable_current_modes():
            self._sweep()
            return {
                known.number: self._used(
                    known.number, _content(torch.UntypedStorage._new_with_weak_ptr(known.reference.cdata))
                )
                for known in self._known.values()
                if not known.pinned
            }

    def run_again(self, choose: Callable[[list[int]], int]) -> dict[int, bytes]:
        """Run everything once more on memory of its own; ``choose`` picks a stream among those that can go on.

        Returns what every memory holds in the end.
        """
        memories = {}
        for number, content in self.memories.items():
            memories[number] = torch.UntypedStorage(len(content))
            if content:
                memories[number].copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage())
        queues = [deque(a for a in self.actions if a.stream == number) for number in range(self.streams)]
        done: set[int | None] = {None}
        before = torch.get_rng_state()
        with torch.no_grad():
            while any(queues):
                able = [n for n, queue in enumerate(queues) if queue and queue[0].awaits in done]
                action = queues[choose(able)].popleft()
                if action.records is not None:
                    done.add(action.records)
                if action.run is not None:
                    action.run(memories)
        torch.set_rng_state(before)
        return {number: self._used(number, _content(storage)) for number, storage in memories.items()}

    def _used(self, number: int, content: bytes) -> bytes:
        return content[: self._ends.get(number, 0)]

    def wrong(self, choose: Callable[[list[int]], int]) -> list[int]:
        """Memories still in use that would hold something else, had the streams gone on like that."""
        expected, found = self.alive(), self.run_again(choose)
        return [number for number, content in expected.items() if found[number] != content]


class EventDevice:
    """A stream whose work takes as long as it is told; the host never waits, but for events; a `torch.cuda`."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []

    def Event(self, *, enable_timing: bool = True) -> TimedEvent:  # noqa: N802
        assert enable_timing
        return TimedEvent(self)

    def synchronize(self, _device: object = None) -> None:
        self.log.append("synchronize")

    def work(self, milliseconds: float) -> None:
        self.log.append("work")
        self.now_ms += milliseconds


class TimedEvent:
    """Says when the stream was there, to those who have waited."""

    def __init__(self, device: EventDevice) -> None:
        self._device = device

    def record(self) -> None:
        self._device.log.append("record")
        self.at_ms, self._place = self._device.now_ms, len(self._device.log)

    def synchronize(self) -> None:
        self._device.log.append("wait")

    def elapsed_time(self, end: TimedEvent) -> float:
        assert {"synchronize", "wait"} & set(self._device.log[end._place :])  # torch raises otherwise
        return end.at_ms - self.at_ms


def latest_copies(able: list[int]) -> int:
    """The compute stream ahead: nothing is copied before somebody waits for it."""
    return min(able)


def earliest_copies(able: list[int]) -> int:
    """The copy streams ahead: operators run when a copy waits for them."""
    return max(able)


def at_random(seed: int) -> Callable[[list[int]], int]:
    """Streams by turns, for a while each."""
    rng = random.Random(seed)
    preferred = [0]

    def choose(able: list[int]) -> int:
        if rng.random() < 0.2:
            preferred[0] = rng.randrange(4)
        return able[preferred[0] % len(able)]

    return choose


def _again(func: Any, windows: Any, outputs: list[Window | None], fresh: set[int], state: Tensor) -> Run:
    def run(memories: Mapping[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree_map(lambda leaf: leaf.on(memories) if isinstance(leaf, Window) else leaf, windows)
        torch.set_rng_state(state)  # random numbers are drawn when a stream is given the operator
        results = tree_leaves(func(*args, **kwargs))
        for window, result in zip(outputs, results, strict=True):
            if window is not None and window.memory in fresh:
                window.on(memories).copy_(result)

    return run


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], gpu: SimulatedGpu) -> set[int]:
    """Memories that an operator says it writes."""
    found = set()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            found |= {gpu._meet(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    return found


def _content(storage: torch.UntypedStorage) -> bytes:
    raw: bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()  # type: ignore[call-overload]
    return raw
