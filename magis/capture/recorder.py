"""Records every ATen call of a step that runs on fake tensors, with storages, versions, phase and module.

A dispatch mode above ``FakeTensorMode`` sees what eager PyTorch would launch: composite operators are already taken
apart, autograd has chosen its backward formulas, in-place operators are still in place (DESIGN section 3: no
decomposition table, no functionalization). Unlike ``make_fx`` it keeps storages, which is what memory is about.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from magis.aten.call import from_torch
from magis.aten.facts import (
    CONTIGUOUS_RESULT,
    KEEPS_INPUT_SIZE,
    SAVED_NUMBERS,
    VIEW_FORM,
    is_random,
    undeclared_writes,
)
from magis.aten.layouts import masked, row_by_row
from magis.aten.mixed import as_mixed
from magis.aten.watched import unwatched
from magis.capture.lines import Lines
from magis.errors import CaptureError
from magis.ir import GENERATOR, Arg, Graph, Op, Ref, Scalar, Storage, Value

ONLY_DENSE = "only dense, strided tensors can be captured"


class Recorder(TorchDispatchMode):
    """Collects storages, values and operators. Use as a context manager around the step, then call ``graph``."""

    def __init__(self, scalars: dict[float, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sentinels = scalars
        self._unwatched = unwatched()
        self._storages: dict[int, Storage] = {GENERATOR: Storage(GENERATOR, 0, "generator")}
        self._versions: dict[int, int] = {GENERATOR: 0}
        self._values: dict[int, Value] = {}
        self._ops: list[Op] = []
        self._storage_of: dict[int, int] = {}
        self._value_of: dict[tuple[Any, ...], int] = {}
        self._made_at: dict[int, int] = {}  # value -> version of its storage
        self._constants: dict[int, tuple[float, ...]] = {}
        self._inputs: list[int] = []
        self._keys_of: dict[int, list[tuple[Any, ...]]] = {}
        self._deaths: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers: list[tuple[int, int]] = []  # position of the forward operator, sequence of its autograd node
        self._number_uses: dict[int, list[int]] = {}  # positions at which an autograd node passes its number on
        self._last_of_node: dict[int, int] = {}
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._lines = Lines()
        self._line_of_node: dict[int, str] = {}
        self._failure: tuple[int, str] = (0, "")  # identity of an error, and the innermost module that it left
        self.phase = "forward"

    # -- what exists before the step ---------------------------------------------------------------------------

    def register(self, tensor: Tensor, kind: str, name: str) -> int:
        """Declare a tensor that exists before the step; returns its value id."""
        value = self._value(tensor, kind, name)
        if value not in self._inputs:
            self._inputs.append(value)
        return value

    def _constant(self, tensor: Tensor) -> int:
        """Declare a tensor whose data is part of the program (Python numbers made into a tensor)."""
        value = self._value(tensor, "constant", f"constant:{len(self._constants)}")
        with _disable_current_modes():  # a real tensor: its numbers are wanted
            self._constants[value] = tuple(tensor.flatten().tolist())
        self._inputs.append(value)
        return value

    def _unknown(self, tensor: Tensor) -> CaptureError:
        return CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that is neither parameter, buffer nor input is used in"
            f" module {self.module or '(root)'!r}",
            hint="register it as a buffer of the module, so that it moves and counts with it",
        )

    # -- recording ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor):
            return self._made_from_numbers(func, args[0])
        if self.phase == "backward":
            func = self._unwatched.form(func, args, kwargs)
        before = self._snapshot(args, kwargs)
        out = func(*args, **kwargs)
        _check_dense(out)
        if str(func) in CONTIGUOUS_RESULT:
            out = row_by_row(out)
        out = as_mixed(str(func), args, masked(func, args, out))
        self._record(func, args, kwargs, out, before)
        return out

    def _made_from_numbers(self, func: Any, data: Tensor) -> Any:
        """``torch.tensor(...)`` in the forward: eager makes the tensor in every step, hence a copy of a constant."""
        out = func(data)
        known = self._constant(data)
        self._record(torch.ops.aten.clone.default, (data,), {}, out, {id(data): known})
        return out

    def _snapshot(self, args: Any, kwargs: Any) -> dict[int, int]:
        """Value id of every tensor argument, looked up before the call (which may change an argument's shape)."""
        found: dict[int, int] = {}
        _check_dense((args, tuple(kwargs.values())))
        for tensor in _tensors((args, tuple(kwargs.values()))):
            key = self._key(tensor)
            known = self._value_of.get(key)
            if known is None:
                if tensor.untyped_storage()._cdata not in self._storage_of:
                    raise self._unknown(tensor)
                known = self._value(tensor, "temporary", "")
            found[id(tensor)] = known
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, before: dict[int, int]) -> None:
        target = VIEW_FORM.get(str(func), str(func))
        many = isinstance(out, (tuple, list))
        returned = list(out) if many else [out]
        if not any(isinstance(item, Tensor) for item in returned) and not _declared_writes(func):
            return
        graph_args: tuple[Arg, ...] = tuple(self._arg(arg, before) for arg in args)
        graph_kwargs = tuple((name, self._arg(arg, before)) for name, arg in sorted(kwargs.items()))
        random = is_random(target, graph_args)
        written = set() if str(func) in VIEW_FORM else self._written(func, target, args, kwargs, graph_args, before)
        fresh_inputs = {self._values[value].storage for value in before.values()}
        reads = sorted(
            (storage, self._versions[storage]) for storage in fresh_inputs | ({GENERATOR} if random else set())
        )
        if random:
            written.add(GENERATOR)
        writes = []
        for storage in sorted(written):
            self._versions[storage] += 1
            writes.append((storage, self._versions[storage]))
        view = not writes and not random and self._all_known(returned)
        if view:
            if all(self._is_current(item) for item in _tensors(returned)):
                return  # detach and the like, or a window that exists already
            reads = []  # a view looks at no data
        least = max(t.numel() * t.element_size() for t in _tensors(args)) if target in KEEPS_INPUT_SIZE else 0
        outputs = [self._output(item, written, renew=view, least=least) for item in returned]
        node: Any = torch._C._current_autograd_node()  # None outside of the backward, whatever the stub says
        # In the forward the node has just been made, before the operator was called: it has the last number given out.
        # A write through a view gets a node around that one (CopySlices), made after the call: the next number.
        wrapped = bool(writes) and isinstance(args[0], Tensor) and args[0]._is_view()
        sequence = _get_sequence_nr() - (0 if wrapped else 1) if node is None else node._sequence_nr()
        if self.phase == "forward":
            module, line = self._modules[-1], self._lines.here()
            self._module_of_node.setdefault(sequence, module)
            self._line_of_node.setdefault(sequence, line)
            if _takes_number(target, graph_args) and args[0].requires_grad:
                self._numbers.append((len(self._ops), sequence))
        else:
            module, line = self._module_of_node.get(sequence, ""), self._line_of_node.get(sequence, "")
            self._last_of_node[sequence] = len(self._ops)
            if _takes_number(target, graph_args):
                self._number_uses.setdefault(sequence, []).append(len(self._ops))
        self._ops.append(
            Op(
                id=len(self._ops), target=target, args=graph_args, kwargs=graph_kwargs, outputs=tuple(outputs),
                many=many, reads=tuple(reads), writes=tuple(writes), random=random, phase=self.phase, module=module,
                line=line,
            )
        )  # fmt: skip

    def _written(
        self,
        func: Any,
        target: str,
        args: Any,
        kwargs: Any,
        graph_args: tuple[Arg, ...],
        before: dict[int, int],
    ) -> set[int]:
        tensors: list[Tensor] = []
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors.extend(_tensors(given))
        for position in undeclared_writes(target, graph_args):
            tensors.extend(_tensors(args[position]))
        return {self._values[before[id(tensor)]].storage for tensor in tensors}

    def _is_current(self, tensor: Tensor) -> bool:
        """Whether a value for this window has been made since the last write to its storage."""
        value = self._value_of.get(self._key(tensor))
        return value is not None and self._made_at[value] == self._versions[self._values[value].storage]

    def _all_known(self, returned: Any) -> bool:
        """Whether all returned tensors lie on storages that existed before the call."""
        return all(tensor.untyped_storage()._cdata in self._storage_of for tensor in _tensors(returned))

    def _output(self, item: Any, written: set[int], *, renew: bool, least: int) -> int | None:
        if not isinstance(item, Tensor):
            return None
        storage = self._storage_of.get(item.untyped_storage()._cdata)
        if renew or (storage is not None and storage in written):
            self._value_of.pop(self._key(item), None)  # the same window, but on new contents: a value of its own
        return self._value(item, "temporary", "", least)

    # -- identities ---------------------------------------------------------------------------------------------

    def _key(self, tensor: Tensor) -> tuple[Any, ...]:
        # Autograd hands out new tensor objects for what it saved: the window on the storage is the identity.
        return (
            tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()),
            tensor.dtype,
        )  # fmt: skip

    def _value(self, tensor: Tensor, kind: str, name: str, least: int = 0) -> int:
        """Value id of a tensor; a storage that is new is at least ``least`` bytes large."""
        key = self._key(tensor)
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
            storage=storage, offset=int(tensor.storage_offset()), name=name,
        )  # fmt: skip
        self._made_at[value] = self._versions[storage]
        self._value_of[key] = value
        self._keys_of.setdefault(address, []).append(key)
        return value

    def _watch_death(self, memory: Any, address: int, storage: int) -> None:
        """Forget the address when the memory goes: it may be given to another storage, and its moment counts."""

        def died(_reference: object) -> None:
            self._deaths[storage] = len(self._ops)
            del self._storage_of[address], self._watched[storage]
            for key in self._keys_of.pop(address, ()):
                self._value_of.pop(key, None)

        self._watched[storage] = weakref.ref(memory, died)

    def _arg(self, arg: Any, before: dict[int, int]) -> Arg:
        if isinstance(arg, Tensor):
            return Ref(before[id(arg)])
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item, before) for item in arg)
        if isinstance(arg, float) and arg in self._sentinels:
            return Scalar(self._sentinels[arg])
        return from_torch(arg)

    # -- modules ------------------------------------------------------------------------------------------------

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Note for every operator the path of the sub-module whose forward is running."""
        handles = []
        for path, child in module.named_modules():
            handles.append(child.register_forward_pre_hook(self._enter(path)))
            handles.append(child.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            self._modules.append(path)

        return hook

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        error = sys.exc_info()[1]  # torch calls this hook while an error of the forward passes, too
        if error is not None and id(error) != self._failure[0]:
            # Not the error itself: its frames would keep their tensors, and checkpointing stops by an error.
            self._failure = (id(error), self.module)
        if len(self._modules) > 1:
            self._modules.pop()

    @property
    def module(self) -> str:
        """Path of the sub-module whose forward is running."""
        return self._modules[-1]

    def module_of(self, error: BaseException) -> str:
        """Path of the innermost sub-module whose forward ``error`` has left, else of the one that is running."""
        return self._failure[1] if id(error) == self._failure[0] else self.module

    @property
    def deaths(self) -> dict[int, int]:
        """For every storage that eager would have freed by now: how many operators had run when it was freed."""
        return dict(self._deaths)

    @property
    def numbers(self) -> tuple[tuple[int, int], ...]:
        """Lives, as first and last position, of the Python numbers that eager keeps as tensors for its backward.

        Operators that take the number are left out: there, it is part of their workspace.
        """
        lives = []
        for made, sequence in self._numbers:
            born = made + 1
            for use in self._number_uses.get(sequence, ()):
                lives.append((born, use - 1))
                born = use + 1
            lives.append((born, self._last_of_node.get(sequence, len(self._ops))))
        return tuple((born, last) for born, last in lives if born <= last)

    # -- result -------------------------------------------------------------------------------------------------

    def value_of(self, tensor: Tensor) -> int:
        """Value id of a tensor that the step has seen."""
        return self._value(tensor, "temporary", "")

    def graph(self, outputs: tuple[int, ...]) -> Graph:
        """Everything recorded so far, in program order."""
        return Graph(
            storages=dict(self._storages), values=dict(self._values), ops=tuple(self._ops),
            inputs=tuple(self._inputs), outputs=outputs, constants=dict(self._constants),
        )  # fmt: skip


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _tensors(part)


def _check_dense(item: Any) -> None:
    for tensor in _tensors(item):
        problem = layout_problem(tensor)
        if problem:
            raise CaptureError(f"the step handles a tensor that is {problem}", hint=ONLY_DENSE)


def layout_problem(tensor: Tensor) -> str:
    """What keeps a tensor from being a strided window on plain memory; empty if nothing does."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantized" if tensor.is_quantized else ""


def _takes_number(target: str, args: tuple[Arg, ...]) -> bool:
    """Whether the operand that an operator's autograd formula keeps is a Python number in this call."""
    position = SAVED_NUMBERS.get(target)
    return position is not None and not isinstance(args[position], Ref)


def _declared_writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
