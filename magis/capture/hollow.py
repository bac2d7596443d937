"""Hollow tensors: plain CPU tensors whose memory is never touched, for steps that are recorded and not computed.

A dispatch mode answers every operator with a tensor of the right shape, strides and dtype, as torch's fake tensor
functions give them, on new memory that is never written: the operating system maps pages on first use, so a network of
any size takes no memory. Unlike torch's fake tensors these are of type `torch.Tensor` and on the device "cpu": no
library can detect tracing by their type, and choose another branch.

Small results that depend on no parameter, no floating-point batch and no random number are *known*: they are computed,
so that Python may read numbers off them (a mask that was just made, a list of sizes). `Hollow.read` names the tensors
on which the numbers that were read depend: a captured step is valid for their contents only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only

from magis.capture.contents import (
    MARK,
    TWIN,
    Contents,
    Made,
    contents_under,
    empty_storage,
    on_storage,
    recipe_of,
    recipe_of_written,
)
from magis.capture.eager_run import Follower, Heard, Reader, by_element, readers_replaced
from magis.capture.schemas import COMPARISONS, ITEM, READS, looks_of, written_by
from magis.capture.traced_numbers import none_traced, trace_read, traced_among, traced_within
from magis.capture.workload import no_reports
from magis.ops.call import EXPECT, as_mixed
from magis.ops.collectives import is_message, is_wait, propagated_apart, wrapped
from magis.ops.eager_only import formulas_as_eager
from magis.ops.fake_results import as_packed, has_minimum_size, known_results, laid_out, masked, unfaked
from magis.ops.generators import DRAW_STATE, GET_STATE, STATE_OPERATORS
from magis.ops.operators import op_info

KNOWN_BYTES = 1 << 22
"""Maximum bytes of a result that is computed."""
MADE_UP_BYTES = 1 << 28
"""Maximum bytes of arguments that are made up to run a kernel for the layout of its results."""
_CPU = torch.device("cpu")
_OWN = STATE_OPERATORS | {EXPECT}


class UnknownTruth(DataDependentOutputException):
    """Error: Python reads a number, or a shape depends on data, of unknown contents, and an eager run would tell
    which."""


class Hollow(TorchDispatchMode):
    """Dispatch mode of hollow tensors, entered by `hollow`; a tensor of one mode is hollow under any other.

    With ``draws`` the mode takes random numbers from the generator as eager does, so that Python may read numbers that
    depend on nothing else: say, which layers a step leaves out. ``drawn`` is True if it did, or would have. ``heard``
    is the record of eager's run: layouts of results and outcomes of branches on data. Contents that the mode creates
    are added to ``made``.
    """

    numbers = False
    """True if random integers in small tensors are drawn as in eager, so that Python can read a batch's lengths."""
    keeps_sources = True
    """True if the mode holds the real tensors that operators read, so that a later step can compare their contents."""

    def __init__(self, *, draws: bool = False, heard: Heard | None = None, made: Made | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = FakeTensorMode()
        self._draws = self._drew = draws
        self._made: Made = WeakSet() if made is None else made
        self.drawn = False
        self.follower = Follower(heard)
        self._news: frozenset[str] = frozenset()
        self.read: set[str] = set()
        """Names of the tensors on whose contents the numbers that Python has read depend."""
        self.kept: dict[str, Tensor] = {}
        """Real tensors that operators read and that Python holds, by their names in `read`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "prim" or str(func) in _OWN:
            return func(*args, **kwargs) if func.namespace == "prim" else self._state(func, args, kwargs)
        if is_wait(func):
            return args[0]
        given = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        says = looks_of(func)
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(numbers)
            contents_under(args[0], self._own_contents(sources=traced_within(args[0])))
        self._note_sources(given)
        if says.view or says.renews:  # metadata only: run the real kernel
            return func(*args, **kwargs)
        written = written_by(func, args, kwargs)
        for tensor in written:
            contents_under(tensor).unit = False
        if func in READS:
            return self._read_number(func, given, args, kwargs)
        decided = _decided(func, args)
        if decided is not None:
            return torch.full(args[0].shape, decided)
        out = self._faked(func, args, kwargs)
        if not written:
            with self._fakes:
                out = self.follower.laid_out(func, out)
        if says.random:
            return self._random(func, given, written, args, kwargs, out)
        known = not is_message(str(func)) and all(contents_under(t).known for t in given if not _among(t, written))
        if known and not says.undefined and self._may_compute(func, given, written, out):
            return self._computed(func, given, written, args, kwargs)
        drawn = all(contents_under(tensor).known or contents_under(tensor).drawn for tensor in given)
        for tensor in written:
            contents_under(tensor).known, contents_under(tensor).drawn = False, drawn
        made = self._hollow(func, out, given, written, drawn=drawn)
        for result, numbers in known_results(func, args, made, self.read_by):
            result.copy_(numbers)
            sources = frozenset().union(*(contents_under(t).sources for t in given if contents_under(t).known))
            setattr(result.untyped_storage(), MARK, self._own_contents(sources=sources))
        return made

    def _own_contents(
        self, *, known: bool = True, sources: frozenset[str] = frozenset(), drawn: bool = False
    ) -> Contents:
        found = Contents(known, sources, self, drawn)
        self._made.add(found)
        return found

    def _note_sources(self, tensors: Iterable[Tensor]) -> None:
        """Name real tensors that no mode made, as sources of the results computed from them."""
        for tensor in tensors if self.keeps_sources else ():
            contents = contents_under(tensor)
            if contents.owner is None:
                name = f"kept:{tensor.untyped_storage()._cdata}"
                contents.sources = frozenset({name})
                self.kept.setdefault(name, tensor)

    def read_by(self, *tensors: Tensor) -> None:
        """Record that Python reads numbers off tensors. Raises DataDependentOutputException for unknown contents."""
        self._note_sources(tensors)
        for contents in (found := [*map(contents_under, tensors)]):
            self.drawn |= contents.drawn
            if not contents.known:
                raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        self._news = none_traced(frozenset().union(*(contents.sources for contents in found))) - self.read
        self.read |= self._news

    def expected(self, of_batch: bool) -> None:
        """Mark the number that Python has just read as checked at every step, so that it may come from any batch."""
        self.read -= {name for name in self._news if of_batch and name.startswith(("input:", "target:"))}

    def _read_number(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number that Python reads; for unknown contents the number of eager's run, or raise if there is
        none."""
        whole = func is not ITEM or not (given[0].is_floating_point() or given[0].is_complex())
        found = self.follower.read() if whole else None
        unknown = [each for each in map(contents_under, given) if not each.known]
        lost = self._drew and not self._draws  # the generator's state is no longer eager's
        if whole and unknown and (lost or not all(each.drawn for each in unknown)):
            if found is None:
                raise UnknownTruth(func)
            self.drawn |= any(each.drawn for each in unknown)
            return found
        self.read_by(*given)
        return func(*args, **kwargs)

    # -- known results -------------------------------------------------------------------------------------------

    def _may_compute(self, func: Any, given: list[Tensor], written: list[Tensor], out: Any) -> bool:
        made = [item for item in tree_iter(out) if isinstance(item, Tensor)]
        if any(item.layout != torch.strided for item in made):
            return False
        if any(tensor.untyped_storage().nbytes() > KNOWN_BYTES for tensor in (*given, *made)):
            return False
        if any(contents_under(tensor).owner not in (self, TWIN) for tensor in written):
            return False
        overwrites = op_info(str(func)).overwrites
        return all(contents_under(t).known or (overwrites and _covers(t)) for t in written)

    def _computed(
        self, func: Any, given: list[Tensor], written: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        sources = traced_among((args, kwargs)).union(*(contents_under(tensor).sources for tensor in given))
        drawn = any(contents_under(tensor).drawn for tensor in given)
        recipe = recipe_of_written(func, args, kwargs) if written and written[0] is args[0] else None
        out = func(*args, **kwargs)
        for tensor in [*written, *(item for item in tree_iter(out) if isinstance(item, Tensor))]:
            contents = contents_under(tensor, self._own_contents())
            contents.known, contents.drawn, contents.sources = True, drawn, contents.sources | sources
            contents.recipe = recipe if written else recipe_of(func, args, kwargs, out)
        return out

    def _random(
        self,
        func: Any,
        given: list[Tensor],
        written: list[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> Any:
        """Return the results of an operator that draws random numbers, and record which contents are known or
        random."""
        whole = isinstance(out, Tensor) and not out.is_floating_point()
        if self.numbers and whole and not written and self._may_compute(func, given, written, out):
            return self._computed(func, given, written, args, kwargs)
        info = op_info(str(func))
        free = info.free_draws and info.overwrites == func._schema.name.endswith("_")
        if not (self._draws and free):
            self._draws = False  # eager's state of the generator is unknown from here
            for tensor in written:
                contents_under(tensor).known, contents_under(tensor).drawn = False, free and _covers(tensor)
            made = self._hollow(func, out, given, written, drawn=free)
        else:
            alike = func._schema.name.endswith("_like")
            certain = alike or all(contents_under(each).known for each in given if not _among(each, written))
            if func is torch.ops.aten.bernoulli_.Tensor and not contents_under(args[1]).known:
                args = (args[0], torch.zeros_like(args[1]))  # the kernel checks every probability
            made = func(*args, **kwargs)
            for tensor in (*written, *(item for item in tree_iter(made) if isinstance(item, Tensor))):
                contents = contents_under(tensor, self._own_contents())
                small = tensor.untyped_storage().nbytes() <= KNOWN_BYTES
                whole = not _among(tensor, written) or _covers(tensor)
                contents.known, contents.drawn = certain and small and whole, certain
        if func._schema.name == "aten::rand":
            contents_under(made).unit = True
        return made

    def _state(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read or set a generator's state: the real one as long as random numbers are really drawn."""
        if self._draws and str(func) != EXPECT:  # EXPECT is a check of bounds
            made = func(*args, **kwargs)
            if isinstance(made, Tensor):
                contents_under(made, self._own_contents(drawn=True))
            return made
        given = str(func) in (GET_STATE, DRAW_STATE)
        return self._hollow(func, self._faked(func, args, kwargs), [], [], drawn=True) if given else None

    # -- hollow results --------------------------------------------------------------------------------------------

    def _faked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake_args, fake_kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        with self._fakes:
            stated = unfaked(func, args, self.read_by)
            if stated is not None:
                return stated if len(func._schema.returns) > 1 else stated[0]
            try:
                out = func(*fake_args, **fake_kwargs)
            except (RuntimeError, NotImplementedError) as error:
                return self._by_kernel(func, args, kwargs, error)
            out = laid_out(str(func), fake_args, out)
            out = as_mixed(str(func), fake_args, masked(func, fake_args, out))
            return as_packed(str(func), fake_args, out)

    def _by_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """Run the real kernel if torch's fake tensor function refuses: some kernels support more, others need known
        numbers. Unknown arguments become zeros, which are valid indices, lengths and offsets."""
        given = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        unknown = [tensor for tensor in given if not contents_under(tensor).known]
        dynamic = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
        if (
            isinstance(error, DynamicOutputShapeException)
            and unknown
            and not all(contents_under(t).drawn for t in unknown)
        ):
            heard = self.follower.made(func)
            if heard is None:
                raise UnknownTruth(func) from error
            return heard if len(func._schema.returns) > 1 else heard[0]
        if dynamic and any(not (tensor.is_floating_point() or tensor.is_complex()) for tensor in unknown):
            raise error
        wanted = sum(tensor.numel() * tensor.element_size() for tensor in given)
        if looks_of(func).random or func.namespace != "aten":
            raise error
        if wanted > MADE_UP_BYTES or any(tensor.device != _CPU for tensor in given):
            raise error

        def made_up(tensor: Tensor) -> Tensor:
            if contents_under(tensor).known:
                return tensor.clone()
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()

        with _disable_current_modes():
            out = func(*tree_map_only(Tensor, made_up, args), **tree_map_only(Tensor, made_up, kwargs))
        if dynamic and not has_minimum_size(func, args, out):
            self.read_by(*(tensor for tensor in given if contents_under(tensor).known))
        return tree_map_only(Tensor, self._fake, out)

    def _fake(self, tensor: Tensor) -> FakeTensor:
        contents = contents_under(tensor)
        key = (
            tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.is_conj(),
            tensor.is_neg(),
        )  # fmt: skip
        found = contents.fakes.get(key)
        if found is None or found.fake_mode is not self._fakes:
            with _disable_current_modes():
                nbytes = tensor.untyped_storage().nbytes()
                if contents.meta is None or contents.meta.nbytes() != nbytes:
                    contents.meta = torch.UntypedStorage(nbytes, device="meta")
                plain = torch.empty(0, dtype=tensor.dtype, device="meta")
                plain.set_(contents.meta, tensor.storage_offset(), tensor.shape, tensor.stride())
                if tensor.is_conj():
                    plain = torch._conj(plain)
                if tensor.is_neg():
                    plain = torch._neg_view(plain)
                found = contents.fakes[key] = FakeTensor(self._fakes, plain, tensor.device)
        return found

    def _hollow(self, func: Any, out: Any, given: list[Tensor], written: list[Tensor], *, drawn: bool) -> Any:
        fakes = {id(self._fake(tensor)): tensor for tensor in (*given, *written)}
        memory = {contents_under(tensor).meta._cdata: tensor.untyped_storage() for tensor in given}  # type: ignore[union-attr]

        def real(fake: Tensor) -> Tensor:
            same = fakes.get(id(fake))
            if same is not None and same.shape == fake.shape:
                return same
            if fake.layout != torch.strided:
                return fake  # refused by the recorder
            if fake.device != _CPU:
                raise RuntimeError(f"{func} moves a tensor to device {fake.device}")
            key = fake.untyped_storage()._cdata
            if key not in memory:
                memory[key] = empty_storage(
                    fake.untyped_storage().nbytes(), self._own_contents(known=False, drawn=drawn)
                )
            return on_storage(memory[key], fake)

        return tree_map_only(Tensor, real, out)


class Answering(Hollow):
    """A mode that makes up the floating-point numbers that Python reads off unknown contents, for code whose memory
    does not depend on them: norms that an optimizer reads. Makes other reads fail as ever."""

    def answer(self, _tensor: Tensor) -> float:
        """Return a number in the place of the one element of a tensor."""
        return 1.0

    def _read_number(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        floats = func is ITEM and given[0].is_floating_point()
        return (
            self.answer(given[0])
            if floats and not contents_under(given[0]).known
            else super()._read_number(func, given, args, kwargs)
        )


def _covers(tensor: Tensor) -> bool:
    """Return True if a write to a tensor overwrites every byte of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and tensor.is_contiguous()


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _decided(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return the outcome of comparing numbers from [0, 1) with a constant; None if it may differ between elements."""
    kind = COMPARISONS.get(func)
    if kind is None or not isinstance(args[1], (int, float)) or not contents_under(args[0]).unit:
        return None
    if args[1] >= 1 or args[1] < 0 or (args[1] == 0 and kind in ("lt", "ge")):
        return (args[1] > 0) == (kind in ("lt", "le"))
    return None


@contextmanager
def hollow(mode: Hollow | None = None) -> Iterator[Hollow]:
    """Enter a mode of hollow tensors, or a new one; `tolist`, `numpy` and other reads past the dispatcher call it
    first."""
    mode = mode or Hollow()

    def asking(name: str, read: Reader) -> Reader:
        def asked(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            contents, whole = contents_under(self), not (self.is_floating_point() or self.is_complex())
            if name == "tolist" and whole and not (contents.known or contents.drawn):
                raise UnknownTruth(ITEM)
            found = trace_read(self, contents.sources, read) if name == "item" and contents.known else None
            if found is not None:
                return found
            if name != "item":
                mode.read_by(self)
            return read(self, *args, **kwargs)

        return by_element(name, asked) if mode.follower.expects else asked

    with readers_replaced(asking), no_reports(), propagated_apart(), formulas_as_eager(), mode:
        yield mode
