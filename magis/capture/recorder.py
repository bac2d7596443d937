"""Recorder of every ATen call of a step on hollow tensors, with storages, versions, phase and module. A dispatch mode
sees what eager PyTorch would launch: composite operators are decomposed, autograd has chosen its backward formulas,
in-place operators are still in-place. Unlike ``make_fx`` it records storages."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from magis.capture.eager_run import is_of_batch
from magis.capture.number_lifetimes import Numbers, kinds, takes_number
from magis.capture.places import Places
from magis.capture.schemas import READS, Own, check_dense, draws, least_bytes, looks_of, tensors_in, window, written_by
from magis.capture.traced_numbers import begun
from magis.errors import CaptureError
from magis.graph import GENERATOR, Arg, Const, Graph, Op, Ref, Scalar, Storage, Value
from magis.ops.call import EXPECT, from_torch, in_parts, only_acts
from magis.ops.collectives import MESSAGES, keeps_order, wrapped
from magis.ops.eager_only import unwatched
from magis.ops.fake_results import bits_of, masked
from magis.ops.generators import DRAW_STATE, GET_STATE, STATE_BYTES, STATE_OPERATORS
from magis.ops.operators import op_info

_ADDED_UP = ("aten.add.Tensor", "aten.add_.Tensor")
_LIST_BYTES = 4096


class Recorder(TorchDispatchMode):
    """Dispatch mode that records storages, values and operators of a step; ``graph`` returns them as a graph."""

    def __init__(
        self,
        scalars: dict[float, str],
        find: Callable[[Tensor], str | None] = lambda _tensor: None,
        generators: Mapping[str, torch.Generator] | None = None,
        *,
        expects: bool = False,
        told: Callable[[bool], None] = lambda _of_batch: None,
    ) -> None:
        """``find`` names an unregistered tensor by the path at which Python holds it; ``generators`` are the step's
        own. Booleans that Python reads off a batch become checks; with ``expects``, integers, too. ``told`` is called
        for each."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._sentinels, self._find, self._trace = scalars, find, begun()
        self._own = Own({} if generators is None else generators)  # the mapping may grow
        self._generators: dict[str, int] = {}  # the step's own by name -> storage
        self._expects, self._told, self._waited = expects, told, False
        self._unwatched = unwatched()
        self._sliced = self._trace.slice_args if self._trace is not None else lambda _target, args: args
        self._storages: dict[int, Storage] = {GENERATOR: Storage(GENERATOR, 0, "generator")}
        self._versions: dict[int, int] = {GENERATOR: 0}
        self._values: dict[int, Value] = {}
        self._ops: list[Op] = []
        self._storage_of: dict[int, int] = {}
        self._value_of: dict[tuple[Any, ...], int] = {}
        self._made_at: dict[int, int] = {}  # value -> version of its storage
        self._constants: dict[int, tuple[complex | Scalar, ...]] = {}
        self._inputs: list[int] = []
        self._keys_of: dict[int, list[tuple[Any, ...]]] = {}
        self._deaths: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers = Numbers(self._ops)
        self._bare: dict[int, int] = {}  # small uninitialized storage -> position of its `empty`
        # Copies without conjugate bits that torch has just made, below autograd, for an operator that needs such.
        self._resolved: set[tuple[Any, ...]] = set()
        self.graded: dict[int, tuple[Tensor, str]] = {}
        """Outside tensors that require a gradient, and where they are used, by `id`."""
        self.places = Places()
        self.phase = "forward"

    # -- what exists before the step ---------------------------------------------------------------------------

    def register(self, tensor: Tensor, kind: str, name: str) -> int:
        """Register a tensor that exists before the step; return its value id."""
        value = self._value(tensor, kind, name)
        if value not in self._inputs:
            self._inputs.append(value)
        return value

    def _constant(self, tensor: Tensor) -> int:
        """Register a tensor whose data is part of the program (made from Python numbers); return its value id."""
        value = self._value(tensor, "constant", f"constant:{len(self._constants)}")
        with _disable_current_modes():  # reads the numbers of a real tensor
            data = tuple(tensor.flatten().tolist())
            self._constants[value] = data if self._trace is None else self._trace.data(data, tensor.dtype)
        self._inputs.append(value)
        return value

    def _held(self, tensor: Tensor) -> None:
        """Register a tensor that the step uses and did not make. Raises CaptureError if no path leads to it."""
        what = f"a tensor of shape {tuple(tensor.shape)} that is neither parameter, buffer nor input"
        used = f"is used in module {self.places.module or '(root)'!r}"
        if tensor.requires_grad:  # the loss must not depend on it
            self.graded[id(tensor)] = tensor, f"{what} and requires a gradient {used}"
        if (name := self._find(tensor)) is None:
            raise CaptureError(f"{what} {used}", hint="register it as a buffer of the module")
        self.register(tensor, "buffer", name)

    # -- recording ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wrapped(types):
            return NotImplemented  # operators on its local shards are dispatched, too
        self._numbers.watch()
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and (parts := in_parts(self, func, args, kwargs)) is not NotImplemented:
            return parts
        if str(func) == EXPECT:
            self._expect([*self._snapshot(args[:1], {}).values()], expected=args[1], how=kwargs["how"])
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not self._all_known(args):
            return self._made_from_numbers(args[0])
        if func is torch.ops.aten._conj.default and not isinstance(args[0], Tensor):
            # A Python number that autograd saved: modes get it as a number.
            func, args = torch.ops.aten.scalar_tensor.default, (args[0].conjugate(),)
            kwargs = {"dtype": torch.complex128}
        if self.phase == "backward":
            func = self._unwatched.form(func, args, kwargs)
        before = self._snapshot(args, kwargs)
        out = masked(func, args, func(*args, **kwargs))
        check_dense(out)
        if func in READS and isinstance(out, int):
            known = [before[id(item)] for item in args]
            of_batch = isinstance(out, bool) and is_of_batch(known, self._ops, self._values, self._storages)
            if of_batch or self._expects:
                self._expect(known, expected=out)
                self._told(of_batch)
        self._record(func, args, kwargs, out, before)
        return out

    def _expect(self, known: list[int], *, expected: float, how: str = "==") -> None:
        """Record an operator that checks a boolean or an integer that Python reads, or a bound that torch checks."""
        order = self._generator(EXPECT)
        read = sorted({self._values[value].storage for value in known})
        module, line = self.places.of_forward(_get_sequence_nr() - 1)
        self._versions[order] += 1
        args: tuple[Arg, ...] = (Ref(known[0]), expected, *map(Ref, known[1:]))
        self._ops.append(
            Op(
                id=len(self._ops), target=EXPECT, args=args, outputs=(), kwargs=() if how == "==" else (("how", how),),
                reads=tuple((storage, self._versions[storage]) for storage in read),
                writes=((order, self._versions[order]),), phase=self.phase, module=module, line=line,
            )
        )  # fmt: skip

    def _awaited(self) -> set[int]:
        """Return the storage that orders the first backward operator after all checks of the forward; else nothing."""
        if self.phase != "backward" or self._waited or EXPECT not in self._generators:
            return set()
        self._waited = True
        return {self._generators[EXPECT]}

    def _made_from_numbers(self, data: Tensor) -> Any:
        """Record ``torch.tensor(...)`` as a copy of a constant: eager makes the tensor at every step."""
        clone = torch.ops.aten.clone.default
        out = clone(data)
        self._record(clone, (data,), {}, out, {id(data): self._constant(data)})
        return out

    def _fill(self, args: Any, written: set[int]) -> None:
        """Turn `empty` operators into copies of constants, where C++ filled memory unseen as it made a tensor from a
        list."""
        for tensor in tensors_in(args):
            storage = self._storage_of[tensor.untyped_storage()._cdata]
            position = self._bare.pop(storage, None)
            if position is None or storage in written or self._versions[storage]:
                continue
            op = self._ops[position]
            whole = self._values[op.made()[0]]
            data = torch.empty(0, dtype=tensor.dtype)
            with _disable_current_modes():
                data.set_(tensor.untyped_storage(), 0, whole.shape, whole.stride)
                known = self._constant(data.clone())
            self._ops[position] = replace(
                op,
                target="aten.clone.default",
                args=(Ref(known),),
                kwargs=(),
                reads=((self._values[known].storage, 0),),
            )

    def _snapshot(self, args: Any, kwargs: Any) -> dict[int, int]:
        """Return the value id of every tensor argument before the call, which may change an argument's shape."""
        found: dict[int, int] = {}
        check_dense((args, tuple(kwargs.values())))
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            key = window(tensor)
            known = self._value_of.get(key)
            if known is None:
                storage = self._storage_of.get(tensor.untyped_storage()._cdata)
                if storage is not None and self._versions[storage]:
                    what = f"a view of shape {tuple(tensor.shape)}, made outside of the forward, of a written tensor"
                    raise CaptureError(f"{what} is read", hint="slice the written tensor within the forward")
                self._held(tensor)  # a storage may have several such tensors
                known = self.value_of(tensor)
            found[id(tensor)] = known
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, before: dict[int, int]) -> None:
        renewed = op_info(str(func)).functional_form(str(func)) if looks_of(func).renews else None
        target = renewed or str(func)
        many = isinstance(out, (tuple, list))
        effect = only_acts(target)
        returned = list(out) if many else [] if effect else [out]
        sets = target in STATE_OPERATORS and target != GET_STATE
        if not any(isinstance(item, Tensor) for item in returned) and not (func._schema.is_mutable or sets or effect):
            return
        graph_args = self._sliced(target, tuple(self._arg(arg, before, target) for arg in args))
        graph_kwargs = tuple((name, self._arg(arg, before, target)) for name, arg in sorted(kwargs.items()))
        random = draws(func, args, kwargs)
        source = self._drawn_from((*args, *kwargs.values()))
        written = set() if renewed else self._written(func, args, kwargs, graph_args, before)
        fresh_inputs = {self._values[value].storage for value in before.values()}
        gives_state = target in (GET_STATE, DRAW_STATE)
        reads = sorted(
            (storage, self._versions[storage])
            for storage in fresh_inputs | ({source} if random or gives_state else set()) | self._awaited()
        )
        written |= ({source} if random or sets else set()) | ({self._generator(EXPECT)} if effect else set())
        writes = []
        for storage in sorted(written):
            self._versions[storage] += 1
            writes.append((storage, self._versions[storage]))
        if view := not writes and not random and self._all_known(returned):
            if all(self._is_current(item) for item in tensors_in(returned)):
                return  # detach and the like, or a known view
            reads = []  # a view reads no data
        else:
            self._fill((*args, *kwargs.values()), written)
        # The state of a GPU's generator is in host memory, which is not counted.
        kind = "host" if gives_state and args[0] != STATE_BYTES["cpu"] else "temporary"
        largest = max((t.numel() * t.element_size() for t in tensors_in(args)), default=0)
        outputs = [
            self._output(item, written, kind, renew=view, least=least_bytes(target, position, item, largest))
            for position, item in enumerate(returned)
        ]
        if target == "aten.empty.memory_format" and returned[0].untyped_storage().nbytes() <= _LIST_BYTES:
            self._bare[self._values[outputs[0] or 0].storage] = len(self._ops)
        node: Any = torch._C._current_autograd_node()  # None outside of the backward, unlike the stub
        # In the forward the node was made just before the operator call: it has the last sequence number.
        # A write through a view gets a wrapping node (CopySlices), made after the call: the next number.
        wrapped = bool(writes) and not effect and isinstance(args[0], Tensor) and args[0]._is_view()
        sequence = _get_sequence_nr() - (0 if wrapped else 1) if node is None else node._sequence_nr()
        if self.phase == "forward":
            module, line = self.places.of_forward(sequence)
            given = kinds(args) if takes_number(func, args) else None
            if given is not None and isinstance(args[0], Tensor) and window(args[0]) in self._resolved:
                given = ((*given[0][:2], True), *given[1:])
            if given is not None:
                self._numbers.taken(func, given, graph_kwargs, sequence, out, at=len(self._ops), in_place=bool(writes))
        else:
            module, line = self.places.of_backward(sequence)
            # The update has no node, and gradients are added up after the node that computes one.
            if node is not None and target not in _ADDED_UP:
                self._numbers.ran(sequence, len(self._ops))
            if node is not None and takes_number(func, args):
                self._numbers.used(sequence, len(self._ops))
        if func is not torch.ops.aten.clone.default:
            self._resolved.clear()
        elif bits_of(args[0]) and args[0].requires_grad:
            self._resolved.add(window(out))
        self._ops.append(
            Op(
                id=len(self._ops), target=target, args=graph_args, kwargs=graph_kwargs, outputs=tuple(outputs),
                many=many, reads=tuple(reads), writes=tuple(writes), random=random, phase=self.phase, module=module,
                line=line,
            )
        )  # fmt: skip

    def _written(
        self, func: Any, args: Any, kwargs: Any, graph_args: tuple[Arg, ...], before: dict[int, int]
    ) -> set[int]:
        info = op_info(str(func))
        undeclared = [args[position] for position in info.undeclared_writes(graph_args)]
        tensors = (*written_by(func, args, kwargs, info.spared(kwargs)), *tensors_in(undeclared))
        found = {self._values[before[id(tensor)]].storage for tensor in tensors}
        return found | {self._generator(MESSAGES)} if keeps_order(str(func), args) else found

    def _is_current(self, tensor: Tensor) -> bool:
        """Return True if a value with this layout was made since the last write to its storage."""
        value = self._value_of.get(window(tensor))
        return value is not None and self._made_at[value] == self._versions[self._values[value].storage]

    def _all_known(self, returned: Any) -> bool:
        """Return True if all returned tensors lie on storages that existed before the call."""
        return all(tensor.untyped_storage()._cdata in self._storage_of for tensor in tensors_in(returned))

    def _output(self, item: Any, written: set[int], kind: str, *, renew: bool, least: int) -> int | None:
        if not isinstance(item, Tensor):
            return None
        storage = self._storage_of.get(item.untyped_storage()._cdata)
        if renew or (storage is not None and storage in written):
            self._value_of.pop(window(item), None)  # equal layout, new contents: a new value
        return self._value(item, kind, "", least)

    # -- identities ---------------------------------------------------------------------------------------------

    def _value(self, tensor: Tensor, kind: str, name: str, least: int = 0) -> int:
        """Return the value id of a tensor, a new one if needed; a new storage has at least ``least`` bytes."""
        key = window(tensor)
        known = self._value_of.get(key)
        if known is not None:
            return known
        address = tensor.untyped_storage()._cdata
        storage = self._storage_of.get(address)
        if storage is None:
            storage = len(self._storages)
            self._storages[storage] = Storage(storage, max(least, tensor.untyped_storage().nbytes()), kind)
            self._storage_of[address] = storage
            self._versions[storage] = 0
            self._watch_death(tensor.untyped_storage(), address, storage)
        value = len(self._values)
        self._values[value] = Value(
            id=value, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=str(tensor.dtype)[6:],
            storage=storage, offset=int(tensor.storage_offset()), name=name, bits=bits_of(tensor),
        )  # fmt: skip
        self._made_at[value] = self._versions[storage]
        self._value_of[key] = value
        self._keys_of.setdefault(address, []).append(key)
        return value

    def _watch_death(self, memory: Any, address: int, storage: int) -> None:
        """Record when a storage dies, and forget its address, which another storage may get."""
        recorder = weakref.ref(self)  # avoids a reference cycle

        def died(_reference: object) -> None:
            this = recorder()
            if this is None:
                return
            this._deaths[storage] = len(this._ops)
            del this._storage_of[address], this._watched[storage]
            for key in this._keys_of.pop(address, ()):
                this._value_of.pop(key, None)

        self._watched[storage] = weakref.ref(memory, died)

    def _arg(self, arg: Any, before: dict[int, int], target: str) -> Arg:
        if isinstance(arg, Tensor):
            return Ref(before[id(arg)])
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item, before, target) for item in arg)
        if isinstance(arg, float) and arg in self._sentinels:
            return Scalar(self._sentinels[arg])
        if isinstance(arg, float) and self._trace is not None:
            return self._trace.scalar(arg, target)
        if isinstance(arg, torch.Generator):
            name = self._own.name_of(arg, self.places.module)
            return Const("generator", name) if name else None
        return from_torch(arg)

    def _drawn_from(self, given: tuple[Any, ...]) -> int:
        """Return the storage of the generator among a call's arguments, else of the default generator."""
        for arg in given:
            name = self._own.name_of(arg, self.places.module) if isinstance(arg, torch.Generator) else ""
            if name:
                return self._generator(name)
        return GENERATOR

    def _generator(self, name: str) -> int:
        """Return the storage that represents a generator, or a fixed order of operators, in the graph."""
        storage = self._generators.setdefault(name, len(self._storages))
        if storage not in self._storages:
            self._storages[storage], self._versions[storage] = Storage(storage, 0, "generator"), 0
        return storage

    # -- what eager kept ----------------------------------------------------------------------------------------

    @property
    def deaths(self) -> dict[int, int]:
        """Number of operators after which eager freed each storage that is dead by now."""
        return dict(self._deaths)

    @property
    def numbers(self) -> tuple[tuple[int, int, int], ...]:
        """First position, last position and bytes of the Python numbers that autograd saves for the backward. Positions
        of operators that take the number are left out: it is part of their workspace."""
        return self._numbers.lives(self._ops, self._values, self._deaths)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Discard what is recorded in the block. Tensors made in it must be dead at its end."""
        names = (
            "_storages", "_versions", "_values", "_ops", "_storage_of", "_value_of", "_made_at", "_keys_of", "_deaths",
            "_watched", "_resolved",
        )  # fmt: skip
        kept = {name: copy.copy(getattr(self, name)) for name in names}
        kept["_keys_of"] = {address: [*keys] for address, keys in self._keys_of.items()}
        try:
            yield
        finally:
            vars(self).update(kept)

    def value_of(self, tensor: Tensor) -> int:
        """Return the value id of a tensor that the step has used."""
        return self._value(tensor, "temporary", "")

    def is_result(self, tensor: Tensor) -> bool:
        """Return True if a tensor was made by the step, or belongs to its batch."""
        known = self._value_of.get(window(tensor))
        return known is not None and self._storages[self._values[known].storage].kind in ("temporary", "batch")

    def graph(self, outputs: tuple[int, ...]) -> Graph:
        """Return all operators recorded so far as a graph, in program order."""
        return Graph(
            storages=dict(self._storages), values=dict(self._values), ops=tuple(self._ops),
            inputs=tuple(self._inputs), outputs=outputs, constants=dict(self._constants),
        )  # fmt: skip
