"""A training step that has not run yet: module, batch and loss; and batches as training loops have them."""

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
    """Enter `FakeTensorMode`, with modules made `convertible`."""
    with convertible(), FakeTensorMode():
        yield


@contextmanager
def no_reports() -> Iterator[None]:
    """Silence torch's log of a failed fake tensor call, whose error the caller handles."""
    chatter = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, chatter.disabled = chatter.disabled, True
    try:
        yield
    finally:
        chatter.disabled = was_disabled


@contextmanager
def convertible() -> Iterator[None]:
    """Let `module.double()`, `.to(...)` and the like work on modules of fake tensors. torch exchanges fake parameters
    with `swap_tensors`, which fails on every tensor that the mode tracks: "_apply(): Couldn't swap Linear.weight"."""
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
    """Convert a parameter in-place, so that ties and optimizers keep it; on another device return a new one, as
    torch."""
    with torch.no_grad():
        data = fn(parameter)
        grad = None if parameter.grad is None else fn(parameter.grad)
    if data.device != parameter.device:
        parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
    else:
        parameter.grad = None  # torch would compare its old dtype with the new one
        parameter.data = data
    parameter.grad = grad
    return parameter


@dataclass(frozen=True, eq=False)
class Workload:
    """A training step that has not run: `loss_fn(module(*inputs), *targets)`, its gradients, the optimizer's update.

    The module is in training mode; all tensors are on the CPU, or fake if it was built under `FakeTensorMode`. Networks
    of magis are float32, modules of a user keep their dtypes. `to` converts the module and the floating-point tensors
    of the batch.
    """

    name: str
    """Registered name ("bert", "seed-bert") or "package.module:factory"."""
    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[..., Tensor]
    """`loss_fn(output, *targets)`, which returns a 0-d tensor."""
    optimizer: OptimizerSpec
    blocks: tuple[str, ...] = ()
    """Paths (`get_submodule`) of the sub-modules that checkpointing per block would wrap, in order."""
    explicit_attention: bool = False
    """True if attention is written out with matmul and softmax, as in the seed variants."""

    @property
    def parts(self) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], Callable[..., Tensor], OptimizerSpec]:
        """Module, inputs, targets, loss and optimizer, in the argument order of captures and steps."""
        return self.module, self.inputs, self.targets, self.loss_fn, self.optimizer

    def to(self, dtype: str) -> Workload:
        """Convert floating-point parameters, buffers and batch to another dtype ("bfloat16"); return the workload."""
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
# containers beside numbers, strings and None, which are constants of the step.

Key: TypeAlias = tuple[tuple[Any, ...], ...]
"""Cache key of a batch: names, shapes, strides, dtypes, devices, shared storages, and all constants."""

EXPECTED = "pass (inputs, targets), each a tensor or a tuple of tensors, or a dictionary of the model's keywords"
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Form:
    """Structure of a caller's batch: `make` rebuilds it from tensors, `looks` is a key to compare structures."""

    make: Callable[[Sequence[Tensor]], Any]
    looks: object


@dataclass(frozen=True)
class Batch:
    """Tensors of a batch by role. With `names`, the inputs are keywords of the model and there are no targets. If a
    batch holds constants or containers, `form` rebuilds the model's arguments and `target_form` the targets."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...] = ()
    names: tuple[str, ...] = ()
    form: Form | None = None
    target_form: Form | None = None
    copied: int = 0
    """Bytes of the caller's tensors that were copied to another layout, and are in memory beside the copies."""

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The tensors by the names of the graph's inputs."""
        return batch_by_name(self.inputs, self.targets)

    def key(self, places: Mapping[int, int] | None = None) -> Key:
        """Return the cache key of the batch; `places` are the module's storages, by address, which a batch may
        share."""
        met: dict[int, tuple[object, int]] = {address: (place, 0) for address, place in (places or {}).items()}
        forms = tuple(("form", form.looks) for form in (self.form, self.target_form) if form is not None)
        return forms + tuple(
            (
                f"{name} {self.names}" if self.names else name, tuple(tensor.shape),
                tensor.stride() if tensor.layout is torch.strided else tensor.layout, tensor.dtype,
                tensor.device, tensor.is_conj(), tensor.is_neg(), _overlap(name, tensor, met),
            )
            for name, tensor in self.by_name.items()
        )  # fmt: skip


def batch_by_name(inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a batch by their names in graphs."""
    roles = ("input", inputs), ("target", targets)
    return {f"{role}:{number}": tensor for role, tensors in roles for number, tensor in enumerate(tensors)}


def _overlap(name: str, tensor: Tensor, met: dict[int, tuple[object, int]]) -> tuple[object, int] | None:
    """Return the tensor with which a tensor shares its storage, and the distance in bytes; None for the first on a
    storage."""
    storage = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
    if not storage or not tensor.numel():
        return None
    start = int(tensor.storage_offset()) * tensor.element_size()
    known = met.setdefault(storage, (name, start))
    return None if known[0] == name else (known[0], start - known[1])


def as_batch(given: Any) -> Batch:
    """Return a caller's batch, `(inputs, targets)` or keywords, as tensors. Raises UsageError for anything else."""
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
    """Return a batch of arguments for model and loss, or of keywords for the model. Raises UsageError for invalid
    ones."""
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
    """Return the structure of a caller's batch; append its tensors to `tensors`."""
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
        keys, values = tuple(item), list(item.values())
        shell = copy.copy(item)
        for key in keys:  # so that it keeps no tensor alive
            shell[key] = None
        remake = partial(_refilled, shell, keys)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        keys = tuple(each.name for each in dataclasses.fields(item))
        values = [getattr(item, key) for key in keys]
        shell = _with_fields(item, keys, [None] * len(keys))
        remake = partial(_with_fields, shell, keys)
    elif isinstance(item, (list, tuple)) and (hasattr(item, "_make") or kind in (list, tuple)):
        values, remake = list(item), getattr(kind, "_make", kind)
    else:
        raise UsageError(f"{role} hold a {kind.__name__}, which is no tensor, number, text or container", hint=EXPECTED)
    parts = [_opened(role, each, tensors) for each in values]
    if not all(isinstance(key, _CONSTANTS) for key in keys):
        raise UsageError(f"{role} hold a {kind.__name__} whose keys are no numbers or texts", hint=EXPECTED)
    looks = (kind, tuple((type(key), repr(key)) for key in keys), tuple(part.looks for part in parts))
    return Form(lambda given: remake([part.make(given) for part in parts]), looks)


def _refilled(shell: MutableMapping[Any, Any], keys: tuple[Any, ...], values: list[Any]) -> MutableMapping[Any, Any]:
    made = copy.copy(shell)
    for key, value in zip(keys, values, strict=True):
        made[key] = value
    return made


def _with_fields(shell: Any, keys: tuple[str, ...], values: list[Any]) -> Any:
    """Copy a dataclass object and set its fields, without its `__init__`."""
    made = copy.copy(shell)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(made, key, value)
    return made


class _Called(nn.Module):
    """A module that takes a batch's tensors as positional arguments, and calls another one with the batch's
    structure."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], form: Form | None) -> None:
        super().__init__()
        self.module = module
        self._names = names
        self._form = form
        self.training = module.training

    def forward(self, *tensors: Tensor) -> Any:
        values = tensors if self._form is None else self._form.make(tensors)
        return self.module(**dict(zip(self._names, values, strict=True))) if self._names else self.module(*values)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules under their paths in the caller's module; parameters and buffers are named by these."""
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its path in the caller's module."""
        return self.module.get_submodule(target)

    def state_dict(self, *given: Any, **keywords: Any) -> Any:
        """Return the tensors of the caller's module by name."""
        return self.module.state_dict(*given, **keywords)


def with_keywords(module: nn.Module, batch: Batch) -> nn.Module:
    """Return a module that takes the batch's tensors as positional arguments."""
    return _Called(module, batch.names, batch.form) if batch.names or batch.form is not None else module


def roots_of(module: nn.Module, loss_fn: object) -> dict[str, object]:
    """Return the user's own module and loss, as the roots of paths to Python objects."""
    return {"model": module.module if isinstance(module, _Called) else module, "loss": loss_fn}


def with_targets(loss_fn: Callable[..., Tensor] | None, batch: Batch) -> Callable[..., Tensor] | None:
    """Return a loss function that takes the targets' tensors as positional arguments."""
    if loss_fn is None or batch.target_form is None:
        return loss_fn
    return partial(_of_targets, loss_fn, batch.target_form)


def _of_targets(loss_fn: Callable[..., Tensor], form: Form, output: Any, *tensors: Tensor) -> Tensor:
    return loss_fn(output, *form.make(tensors))


class _WithLoss(nn.Module):
    """A module together with a loss that has parameters; its output goes to `_applied`."""

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
    """Return module and loss function; a loss with tensors of its own becomes a sub-module."""
    if not isinstance(loss_fn, nn.Module):
        return module, loss_fn
    known = {id(parameter) for parameter in module.parameters()}
    trains = any(parameter.requires_grad and id(parameter) not in known for parameter in loss_fn.parameters())
    # A user's own loss may replace tensors that it has: the centre of DINO's loss, a running mean.
    parts = [part for part in loss_fn.modules() if not type(part).__module__.startswith("torch.")]
    replaces = any(isinstance(each, Tensor) for part in parts for each in (*part.buffers(), *vars(part).values()))
    return (_WithLoss(module, loss_fn), _applied) if trains or replaces else (module, loss_fn)


def own_loss(output: Any, *targets: Tensor) -> Tensor:
    """Return the loss in a module's own output: a tensor, `output.loss` as in Hugging Face's models, or else the only
    floating-point number that requires a gradient. Raises CaptureError if there is none or more than one, or if there
    are targets and no loss function."""
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
    """Yield single-element floating-point tensors in an output that can be trained, by their path."""
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
