"""One training step that has not run yet: module, batch, loss; batches as training loops have them."""

from __future__ import annotations

import copy
import dataclasses
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from magis.capture.schemas import ONLY_DENSE, layout_problem
from magis.errors import CaptureError, UsageError
from magis.ops.optimizers import OptimizerSpec


@contextmanager
def fake_tensors() -> Iterator[None]:
    """`FakeTensorMode`, in which modules are `convertible`."""
    with convertible(), FakeTensorMode():
        yield


@contextmanager
def no_reports() -> Iterator[None]:
    """Hold back torch's own report of a failed fake call: who makes the call says what comes of it."""
    chatter = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, chatter.disabled = chatter.disabled, True
    try:
        yield
    finally:
        chatter.disabled = was_disabled


@contextmanager
def convertible() -> Iterator[None]:
    """`module.double()`, `.to(...)` and the like work on modules of fake tensors as they do on real ones.

    torch exchanges fake parameters with `swap_tensors`, which fails on every tensor that the mode keeps track of:
    "_apply(): Couldn't swap Linear.weight".
    """
    apply: Callable[..., nn.Module] = nn.Module._apply

    def convert(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(parameter, FakeTensor) for parameter in self._parameters.values()):
            return apply(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = _converted(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


def _converted(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """The parameter itself, so that ties and optimizers keep it; a new one on another device, as in torch."""
    with torch.no_grad():
        data = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if data.device != parameter.device:
        parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        parameter.grad = None  # of the old type, which torch would compare with the new one
        parameter.data = data
    parameter.grad = grad
    return parameter


@dataclass(frozen=True, eq=False)
class Workload:
    """One training step, not run yet: `loss_fn(module(*inputs), *targets)`, its gradients, the optimizer's update.

    The module is in training mode; all tensors are on the CPU, or fake ones where it was built on these. Those of
    magis's own networks are float32 (or integer), those of a user's what they were built as. `to` converts the
    module and the floating-point tensors of the batch.
    """

    name: str
    """The registered name ("bert", "seed-bert") or "package.module:factory"."""
    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[..., Tensor]
    """`loss_fn(output, *targets)`, a scalar."""
    optimizer: OptimizerSpec
    blocks: tuple[str, ...] = ()
    """Paths (`get_submodule`) of the sub-modules that activation checkpointing per block would wrap, in order."""
    explicit_attention: bool = False
    """True if attention is written out with matmul and softmax, as in the seed variants."""

    @property
    def parts(self) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], Callable[..., Tensor], OptimizerSpec]:
        """Everything that captures and steps are made of, in the order in which they take it."""
        return self.module, self.inputs, self.targets, self.loss_fn, self.optimizer

    def to(self, dtype: str) -> Workload:
        """The same workload with floating-point parameters, buffers and batch of another data type ("bfloat16")."""
        kind = getattr(torch, dtype)

        def convert(tensor: Tensor) -> Tensor:
            return tensor.to(kind) if tensor.is_floating_point() else tensor

        with convertible():
            self.module.to(kind)
        return replace(
            self,
            inputs=tuple(convert(t) for t in self.inputs),
            targets=tuple(convert(t) for t in self.targets),
        )


# Batches as a training loop has them: inputs and targets, or keywords of the model; each a tensor, or tensors in
# containers beside numbers, texts and None, which are constants of the step.

Key: TypeAlias = tuple[tuple[Any, ...], ...]
"""Properties of a batch that a plan depends on: names, shapes, strides, data types and devices, what lies in one
memory, and all that is no tensor."""

EXPECTED = "pass (inputs, targets), each a tensor or a tuple of tensors, or a dictionary of the model's keywords"
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Form:
    """Where tensors stand in what a caller passed: makes that again of other tensors; equal forms look alike."""

    make: Callable[[Sequence[Tensor]], Any]
    looks: object


@dataclass(frozen=True)
class Batch:
    """Tensors by role. With `names`, the inputs are keywords of the model and there are no targets. Of a batch that
    holds more than tensors, `form` makes positional arguments, keywords and `target_form` targets."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...] = ()
    names: tuple[str, ...] = ()
    form: Form | None = None
    target_form: Form | None = None

    @property
    def by_name(self) -> dict[str, Tensor]:
        """By the names of the graph's inputs."""
        return batch_by_name(self.inputs, self.targets)

    def key(self, places: Mapping[int, int] | None = None) -> Key:
        """`places` are the addresses of memory that the step has besides: the module's parameters and buffers."""
        met: dict[int, tuple[object, int]] = {address: (place, 0) for address, place in (places or {}).items()}
        forms = tuple(("form", form.looks) for form in (self.form, self.target_form) if form is not None)
        return forms + tuple(
            (
                f"{name} {self.names}" if self.names else name, tuple(tensor.shape), _strides(tensor), tensor.dtype,
                tensor.device, tensor.is_conj(), tensor.is_neg(), _overlap(name, tensor, met),
            )
            for name, tensor in self.by_name.items()
        )  # fmt: skip


def batch_by_name(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a batch by the names that they have in graphs."""
    roles = ("input", inputs), ("target", targets)
    return {f"{role}:{number}": tensor for role, tensors in roles for number, tensor in enumerate(tensors)}


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else tensor.layout


def _overlap(name: str, tensor: Tensor, met: dict[int, tuple[object, int]]) -> tuple[object, int] | None:
    """With what a tensor shares its memory, and the bytes in between; None: with nothing met so far."""
    storage = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    if not storage or not tensor.numel():
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    known = met.setdefault(storage, (name, start))
    return None if known[0] == name else (known[0], start - known[1])


def as_batch(given: Any) -> Batch:
    """The batch in what a caller passed: `(inputs, targets)`, or keywords. Raises UsageError for anything else."""
    if isinstance(given, Mapping):
        found = batch_of((), None, dict(given))
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        found = batch_of(*given)
    else:
        what = f"{len(given)} values" if isinstance(given, (tuple, list)) else f"a {type(given).__name__}"
        raise UsageError(f"a batch of {what}", hint=EXPECTED)
    for role, tensors in (("inputs", found.inputs), ("targets", found.targets)):
        for tensor in tensors:
            if tensor.requires_grad:
                raise UsageError(
                    f"{role} hold a tensor that requires a gradient", hint="detach it: only weights are trained"
                )
            if tensor.layout is not torch.strided and (problem := layout_problem(tensor)):
                raise UsageError(f"{role} hold a tensor that is {problem}", hint=ONLY_DENSE)
    return found


def batch_of(inputs: Any, targets: Any, keywords: Mapping[str, Any] | None = None) -> Batch:
    """A batch of arguments of the model and of the loss; or of keywords of the model alone. UsageError."""
    if keywords is None:
        given, wanted = (each if isinstance(each, (tuple, list)) else (each,) for each in (inputs, targets))
    else:
        given, wanted = list(keywords.values()), ()
    if not all(isinstance(name, str) for name in keywords or ()):
        raise UsageError("the batch has a key that is no name of an argument", hint=EXPECTED)
    names, role = tuple(keywords or ()), "inputs" if keywords is None else "the batch"
    if all(isinstance(item, Tensor) for item in (*given, *wanted)):
        return Batch(tuple(given), tuple(wanted), names)
    tensors: tuple[list[Tensor], list[Tensor]] = [], []
    form = _opened(role, tuple(given), tensors[0])
    target_form = _opened("targets", tuple(wanted), tensors[1])
    form = replace(form, looks=(names, form.looks))
    return Batch(tuple(tensors[0]), tuple(tensors[1]), names, form, target_form)


def _opened(role: str, item: Any, tensors: list[Tensor]) -> Form:
    """The form of what a caller passed, without its tensors, which are appended."""
    kind = type(item)
    if isinstance(item, Tensor):
        number = len(tensors)
        tensors.append(item)
        return Form(lambda given: given[number], "tensor")
    if isinstance(item, _CONSTANTS):
        return Form(lambda _: item, (kind, repr(item)))
    keys: tuple[Any, ...] = ()
    remake: Callable[[list[Any]], Any]
    if isinstance(item, MutableMapping):
        keys, values, remake = tuple(item), list(item.values()), partial(_refilled, _emptied(item), tuple(item))
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        keys = tuple(each.name for each in dataclasses.fields(item))
        values, remake = [getattr(item, key) for key in keys], partial(_with_fields, _without_fields(item, keys), keys)
    elif isinstance(item, (list, tuple)) and (hasattr(item, "_make") or kind in (list, tuple)):
        values, remake = list(item), getattr(kind, "_make", kind)
    else:
        raise UsageError(f"{role} hold a {kind.__name__}, which is no tensor, number, text or container", hint=EXPECTED)
    parts = [_opened(role, each, tensors) for each in values]
    if not all(isinstance(key, _CONSTANTS) for key in keys):
        raise UsageError(f"{role} hold a {kind.__name__} whose keys are no numbers or texts", hint=EXPECTED)
    looks = (kind, tuple((type(key), repr(key)) for key in keys), tuple(part.looks for part in parts))
    return Form(lambda given: remake([part.make(given) for part in parts]), looks)


def _emptied(item: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """A container of the same class, with whatever else it holds, that keeps no tensor alive."""
    shell = copy.copy(item)
    for key in tuple(shell):
        shell[key] = None
    return shell


def _refilled(shell: MutableMapping[Any, Any], keys: tuple[Any, ...], values: list[Any]) -> MutableMapping[Any, Any]:
    made = copy.copy(shell)
    for key, value in zip(keys, values, strict=True):
        made[key] = value
    return made


def _without_fields(item: Any, keys: tuple[str, ...]) -> Any:
    return _with_fields(item, keys, [None] * len(keys))


def _with_fields(shell: Any, keys: tuple[str, ...], values: list[Any]) -> Any:
    """A record of the same class, made without its checks, as `copy` makes them."""
    made = copy.copy(shell)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


class _Called(nn.Module):
    """Calls a module with the tensors of a batch where they stand in it, or as its keywords."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], form: Form | None) -> None:
        super().__init__()
        self.module = module
        self._names = names
        self._form = form
        self.training = module.training

    def forward(self, *tensors: Tensor) -> Any:
        values = tensors if self._form is None else self._form.make(tensors)
        return self.module(**dict(zip(self._names, values, strict=True))) if self._names else self.module(*values)


def with_keywords(module: nn.Module, batch: Batch) -> nn.Module:
    """The module as it takes the batch's tensors one after another."""
    return _Called(module, batch.names, batch.form) if batch.names or batch.form is not None else module


def roots_of(module: nn.Module, loss_fn: object) -> dict[str, object]:
    """The module and the loss as the user has them, by the names that paths to what they hold begin with."""
    return {"model": module.module if isinstance(module, _Called) else module, "loss": loss_fn}


def with_targets(loss_fn: Callable[..., Tensor] | None, batch: Batch) -> Callable[..., Tensor] | None:
    """The loss function as it takes the targets' tensors one after another."""
    if loss_fn is None or batch.target_form is None:
        return loss_fn
    return partial(_of_targets, loss_fn, batch.target_form)


def _of_targets(loss_fn: Callable[..., Tensor], form: Form, output: Any, *tensors: Tensor) -> Tensor:
    return loss_fn(output, *form.make(tensors))


class _WithLoss(nn.Module):
    """A module beside a loss with parameters of its own, which it hands on to `_applied`."""

    def __init__(self, module: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.training = module.training

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[nn.Module, Any]:
        return self.loss, self.module(*inputs, **keywords)


def _applied(given: tuple[nn.Module, Any], *targets: Tensor) -> Any:
    loss, output = given
    return loss(output, *targets)


def with_loss(
    module: nn.Module, loss_fn: Callable[..., Tensor] | None
) -> tuple[nn.Module, Callable[..., Tensor] | None]:
    """The module and the loss function; a loss with tensors of its own becomes a part of the module."""
    if not isinstance(loss_fn, nn.Module):
        return module, loss_fn
    known = {id(parameter) for parameter in module.parameters()}
    trains = any(parameter.requires_grad and id(parameter) not in known for parameter in loss_fn.parameters())
    return (_WithLoss(module, loss_fn), _applied) if trains or _keeps_tensors(loss_fn) else (module, loss_fn)


def _keeps_tensors(loss: nn.Module) -> bool:
    """Return True if a user's own loss has tensors that it may replace: the centre of DINO's, a running mean."""
    parts = [part for part in loss.modules() if not type(part).__module__.startswith("torch.")]
    return any(isinstance(each, Tensor) for part in parts for each in (*part.buffers(), *vars(part).values()))


def own_loss(output: Any, *targets: Tensor) -> Tensor:
    """The loss that a module returns itself: a tensor, `output.loss` as in Hugging Face's models, or else the only
    floating-point number in the output that requires a gradient.

    Raises CaptureError where there is none or more than one, or where there are targets that nothing would compare the
    output with.
    """
    if targets:
        raise CaptureError("a loss function is needed for targets", hint="pass one, or the batch as keywords")
    if isinstance(output, Tensor):
        return output
    absent = object()
    named = output.get("loss", absent) if isinstance(output, Mapping) else getattr(output, "loss", absent)
    if isinstance(named, Tensor):
        return named
    found = dict(_trainable_numbers("", output)) if named is absent else {}
    if len({id(number) for number in found.values()}) == 1:
        return next(iter(found.values()))
    what = f"the model returned a {type(output).__name__}"
    if found:
        raise CaptureError(
            f"{what} with several numbers: {', '.join(found)}", hint="pass a loss function that picks one"
        )
    raise CaptureError(f"{what} without a loss", hint="pass a loss function, or labels")


def _trainable_numbers(path: str, item: Any) -> Iterator[tuple[str, Tensor]]:
    """Single floating-point numbers in an output that can be trained, by where they are."""
    if isinstance(item, Tensor):
        if item.numel() == 1 and item.is_floating_point() and (item.requires_grad or not torch.is_grad_enabled()):
            yield path, item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _trainable_numbers(f"{path}[{key!r}]", value)
    elif isinstance(item, (list, tuple)):
        names = getattr(item, "_fields", ())
        for index, value in enumerate(item):
            yield from _trainable_numbers(f"{path}.{names[index]}" if names else f"{path}[{index}]", value)
    elif dataclasses.is_dataclass(item):
        for each in dataclasses.fields(item):
            yield from _trainable_numbers(f"{path}.{each.name}", getattr(item, each.name))
