"""Refusals of steps that cannot be captured, each in one line that names the place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import _engine_run_backward
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from magis.capture.hollow import UnknownTruth
from magis.capture.places import Places
from magis.capture.schemas import ONLY_DENSE, layout_problem
from magis.capture.stand_ins import StandIns
from magis.errors import CaptureError, MagisError, UsageError
from magis.graph import Graph
from magis.ops.call import CallError
from magis.ops.operators import op_info

INFERENCE = "unfreeze one (requires_grad_), or pass optimizer='none' for inference"
BY_HOOK = "make what depends on that gradient a part of the loss, or train without magis.optimize"
EAGER_FIRST = "the step must run eagerly before it can be captured"


def in_place_of(given: type, module: str) -> str:
    """Return the hint for a class given in place of an object; `module` is the name of the model there."""
    arguments = f"{module}.parameters()" if issubclass(given, Optimizer) else ""
    return f"call it: {given.__name__}({arguments})"


def check_parts(module: object, loss_fn: object, optimizer: object) -> None:
    """Raise UsageError for a model, loss or optimizer of a wrong type: a class, a function, a scheduler, a lazy
    module."""
    for what, given in (("model", module), ("loss function", loss_fn), ("optimizer", optimizer)):
        if isinstance(given, type):
            raise UsageError(f"the {what} is the class {given.__name__}", hint=in_place_of(given, "model"))
    if not isinstance(module, nn.Module):
        raise UsageError(f"the model is of type {type(module).__name__}", hint="give a torch.nn.Module")
    check_uncompiled(module)
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"the loss function is of type {type(loss_fn).__name__}", hint="give a function, or None")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        own = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        hint = "give the optimizer that it drives" if own else "give a torch.optim.Optimizer, or None"
        raise UsageError(f"the optimizer is of type {type(optimizer).__name__}", hint=hint)
    parameters: Iterable[tuple[str, Any]] = module.named_parameters()
    lazy = next((name for name, each in parameters if is_lazy(each)), None)
    if lazy is not None:
        raise UsageError(f"parameter {lazy} is lazy, and has no shape yet", hint="call the model once on a batch")


def check_uncompiled(module: nn.Module, name: str = "the model") -> None:
    """Raise UsageError for a module with parts that torch.compile compiles."""
    for path, each in module.named_modules():
        if "_orig_mod" in each._modules or getattr(each, "_compiled_call_impl", None) is not None:
            raise UsageError(
                f"{name} is compiled by torch.compile (module {path or '(root)'!r})",
                hint="give it uncompiled: the strategy compile, compiled=True and --compiled compile it",
            )


def check_tensors(module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Raise CaptureError for tensors that are not dense, or not on the CPU."""
    check_layouts(module)
    batch = {f"input {i}": t for i, t in enumerate(inputs)} | {f"target {i}": t for i, t in enumerate(targets)}
    _check_dense(batch.items())
    for name, tensor in (*module.named_parameters(), *module.named_buffers(), *batch.items()):
        if tensor.device.type != "cpu":
            hint = "pass the module and its batch on the CPU (module.cpu())"
            if tensor.device.type == "meta":
                hint = "build it on the CPU, not on 'meta': a factory is called on fake tensors, and takes no memory"
            raise CaptureError(f"{name} is on device {tensor.device}", hint=hint)


def check_layouts(module: nn.Module) -> None:
    """Raise CaptureError for parameters and buffers that are not dense."""
    _check_dense((*module.named_parameters(), *module.named_buffers()))


def _check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in named:
        problem = layout_problem(tensor)
        if problem:
            raise CaptureError(f"{name} is {problem}", hint=ONLY_DENSE)


def check_replaced(stand: StandIns, memory: Mapping[int, int], results: Collection[Tensor], *, settled: bool) -> None:
    """Raise CaptureError if the forward replaced a parameter or a buffer, or its data, by a tensor that is not among
    the step's `results`. `memory` are the old storage addresses by the tensor's `id`."""
    after = {storage.untyped_storage()._cdata for storage in results}
    found = {**stand.named(), **{f"buffer:{name}": buffer for name, buffer in stand.module.named_buffers()}}
    for name, tensor in found.items():
        known = memory.get(id(tensor))
        address = tensor.untyped_storage()._cdata
        if known == address or name.startswith(("input:", "target:")) or (known is None and not settled):
            continue
        if address not in after or (tensor.requires_grad and known is not None):
            kind, _, path = name.partition(":")
            raise CaptureError(
                f"the forward replaces {kind} {path!r}: the next step would not see that",
                hint="update it in place, with copy_ say",
            )


def shapes(stand: StandIns) -> Mapping[str, tuple[torch.Size, tuple[int, ...]]]:
    """Return shape and strides of every tensor that the step is given, by name."""
    return {name: (tensor.shape, tensor.stride()) for name, tensor in stand.named().items()}


def check_shapes(before: Mapping[str, tuple[torch.Size, tuple[int, ...]]], stand: StandIns) -> None:
    """Raise CaptureError if the step changed the shape of a given tensor, from which the next step would start."""
    for name, (shape, strides) in shapes(stand).items():
        if (shape, strides) != before[name]:
            raise CaptureError(
                f"the step changes the shape of {name} from {list(before[name][0])} to {list(shape)} in place",
                hint="use a view of it (unsqueeze, not unsqueeze_); where only the first step does so, run that first",
            )


def check_batch(stand: StandIns) -> None:
    """Raise CaptureError if the step writes a tensor with a gradient into its batch, as eager's autograd graph has
    it."""
    given = {name: tensor for name, tensor in stand.named().items() if name.startswith(("input:", "target:"))}
    for name, tensor in given.items():
        if tensor.requires_grad:
            raise CaptureError(
                f"the step writes what depends on trained parameters into {name}, in place",
                hint="write to a clone of it",
            )


def check_products(graph: Graph) -> None:
    """Raise CaptureError for operands of different dtypes, which kernels refuse and fake tensor functions accept."""
    for op in graph.ops:
        if not op_info(op.target).one_dtype or op.target.endswith(".dtype"):
            continue
        dtypes = sorted({graph.values[value].dtype for value in op.inputs()})
        if len(dtypes) > 1:
            raise CaptureError(
                f"mixed data types: {op.target} in module {op.module or '(root)'!r} is given {' and '.join(dtypes)}",
                hint=EAGER_FIRST,
            )


def check_contents(changed: Collection[str]) -> None:
    """Raise CaptureError if Python reads numbers off tensors that the step changes: the next step would read others."""
    for name in sorted(changed):
        raise CaptureError(
            f"the step reads numbers off {name}, which it changes: they would be others in the next step",
            hint="compute with the tensor instead",
        )


def read_and_written(graph: Graph, read: Collection[str]) -> frozenset[str]:
    """Return the names of inputs that the step writes and off which Python reads numbers (`read`)."""
    written = {storage for op in graph.ops for storage, _ in op.writes}
    found = (graph.values[value] for value in graph.inputs)
    return frozenset(value.name for value in found if value.name in read and value.storage in written)


def check_loss(loss: Any) -> None:
    """Raise CaptureError for a loss that is not a single real number which depends on trained parameters."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what, hint = f"type {type(loss).__name__}", "pass a loss_fn that returns a scalar"
        if isinstance(loss, Tensor):
            what, hint = f"shape {tuple(loss.shape)}", f"{hint}: its mean() or sum(), say"
        elif loss is None or isinstance(loss, (int, float)):
            hint = f"{hint} tensor" + (": it lacks a return" if loss is None else ", without item() or float()")
        raise CaptureError(f"the loss is not a single number but of {what}", hint=hint)
    if loss.is_complex():
        raise CaptureError("the loss is a complex number", hint="return its real part or its absolute value")
    if not loss.requires_grad:
        cut = "look for what cuts it off: detach(), .data, item(), torch.tensor(...) or torch.no_grad()"
        raise CaptureError("the loss does not depend on any trained parameter", hint=cut)


def nodes_behind(loss: Tensor) -> Iterator[Any]:
    """Yield the autograd nodes on which a loss depends."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


@contextmanager
def no_gradient_for(graded: Collection[tuple[Tensor, str]], loss: Tensor) -> Iterator[None]:
    """Raise CaptureError if the backward of the block reaches outside tensors, as a plan computes no gradients for
    them."""
    known = {id(tensor if tensor.is_leaf else tensor.grad_fn): said for tensor, said in graded}
    for node in nodes_behind(loss) if known else ():
        _check_ungraded(known, id(getattr(node, "variable", node)))
    before = [(tensor, tensor.grad) for tensor, _ in graded if tensor.is_leaf]
    for tensor, _ in before:
        tensor.grad = None
    try:
        yield
        for tensor, _ in before:  # recomputed forwards in the backward may have autograd graphs of their own
            if tensor.grad is not None:
                _check_ungraded(known, id(tensor))
    finally:
        for tensor, grad in before:
            tensor.grad = grad


def _check_ungraded(known: Mapping[int, str], here: int) -> None:
    if here in known:
        raise CaptureError(
            known[here], hint="register it as a parameter (a loss with such is an nn.Module), or detach it"
        )


class BranchError(CaptureError):
    """Error: a step branches on data that a capture does not know, and that an eager run would tell."""


@contextmanager
def clear_errors(places: Places, around: str = "the loss function") -> Iterator[None]:
    """Turn errors of the step into CaptureErrors of one line that names module and user line. `around` are the words
    for the user's code that runs outside of the module."""
    try:
        yield
    except CallError as error:
        raise CaptureError(f"{error} ({_innermost_place(places, error, around)})") from error
    except MagisError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        kind = BranchError if isinstance(error, UnknownTruth) else CaptureError
        raise kind(
            f"the step depends on the data of a tensor ({error.func}) {_innermost_place(places, error, around)}",
            hint="replace the data-dependent number, branch or shape (no item(), torch.where, fixed shapes)",
        ) from error
    except Exception as error:
        if isinstance(error, NotImplementedError) and "storage of Sparse" in str(error):
            raise CaptureError(
                f"the step handles a sparse tensor {_innermost_place(places, error, around)}", hint=ONLY_DENSE
            ) from error
        raise CaptureError(
            f"{type(error).__name__} {_innermost_place(places, error, around)}: {error}",
            hint=EAGER_FIRST,
        ) from error


@contextmanager
def no_own_backward(phase: Callable[[], str]) -> Iterator[None]:
    """Raise CaptureError if the block calls `backward` in the phase "forward": the step itself does so behind it."""
    plain = torch.autograd.backward

    def asked(*given: Any, **keywords: Any) -> None:
        if phase() == "forward":
            raise CaptureError(
                "the model or its loss function calls backward, which is called on the loss that it returns",
                hint="leave it out; a step with a backward of its own is for magis.estimate(step, batch)",
            )
        plain(*given, **keywords)

    torch.autograd.backward = asked
    try:
        yield
    finally:
        torch.autograd.backward = plain


@contextmanager
def no_gradient_retained() -> Iterator[None]:
    """Raise CaptureError if the block calls `retain_grad` on a non-leaf tensor: planned steps keep no such gradient."""
    retain = Tensor.retain_grad

    def asked(tensor: Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise CaptureError("the forward calls retain_grad: a planned step keeps no such gradient", hint=BY_HOOK)
        retain(tensor)

    Tensor.retain_grad = asked  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del Tensor.retain_grad


def of_contents(error: BaseException | None) -> bool:
    """Return True if a refusal is due to contents that hollow tensors lack and real tensors have."""
    kinds = (DataDependentOutputException, DynamicOutputShapeException)
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__ or error.__context__
    return error is not None


def _innermost_place(places: Places, error: BaseException, around: str) -> str:
    """Return the sub-module, or `around` or the backward; and file and line of the innermost frame outside of torch
    and capture."""
    here = Path(__file__).parent
    own = (Path(torch.__file__).parent, here, here.parent / "ops")
    whole = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in whole if not any(Path(frame.filename).is_relative_to(folder) for folder in own)]
    line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    module = places.module_of(error)
    if module is None:
        is_backward = any(frame.name == _engine_run_backward.__name__ for frame in whole)
        return f"in {'the backward' if is_backward else around}{line}"
    return f"in module {module or '(root)'!r}{line}"
