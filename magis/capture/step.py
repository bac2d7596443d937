"""Captures a training step (or an inference) of any module as one graph.

The step runs once on fake CPU tensors: nothing is computed and nothing allocated, whatever the sizes. Device forms
(a fused dropout, an attention kernel) are substituted by ``device_table`` while tracing; devices themselves are
replaced when the step is realized.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import _engine_run_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module

from magis.aten import optimizers
from magis.aten.call import CallError
from magis.capture.autocast import as_on_cuda
from magis.capture.autocast import autocast as casting
from magis.capture.device_table import device_forms
from magis.capture.recorder import ONLY_DENSE, Recorder, layout_problem
from magis.errors import CaptureError, MagisError
from magis.ir import Graph

INFERENCE = "use optimizer kind 'none' for inference"


@dataclass(frozen=True)
class Captured:
    """A captured step.

    ``graph`` is in program order with eager's in-place operators. ``deaths`` maps a storage to the number of
    operators after which eager frees it (missing: it lives to the end), so that the graph in program order
    reproduces eager's memory byte for byte. ``numbers`` are the lives (first and last position) of Python numbers that
    eager keeps for the backward as small CPU tensors, outside of the graph. ``parameters`` are the names of the
    trained parameters.
    """

    graph: Graph
    deaths: Mapping[int, int]
    numbers: tuple[tuple[int, int], ...]
    parameters: tuple[str, ...]
    dtype: str
    rule: optimizers.OptimizerSpec
    graded: tuple[str, ...] = ()
    """Those of the trained parameters that have a gradient."""


def capture(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: Callable[..., Tensor] | None,
    rule: optimizers.OptimizerSpec,
    *,
    device: str = "cpu",
    explicit_attention: bool = False,
    autocast: str | None = None,
) -> Captured:
    """Capture ``loss_fn(module(*inputs), *targets)``, its gradients and the update as a graph.

    The tensors may be real or fake; they are not changed. ``device`` ("cpu" or "cuda") chooses the operators that
    this device would run, ``autocast`` ("bfloat16" or "float16") the type that forward and loss are autocast to. Raises
    CaptureError, naming module and line, for steps that are not one static graph.
    """
    _check_tensors(module, inputs, targets)
    mode = _fake_mode([*module.parameters(), *module.buffers(), *inputs, *targets])
    training = rule.kind != "none"
    trained = tuple(name for name, p in module.named_parameters() if training and p.requires_grad)
    if training and not trained:
        raise CaptureError("there is nothing to train: no parameter requires a gradient", hint=INFERENCE)
    fakes = _fakes(mode, module, inputs, targets, trained)
    marks = optimizers.sentinels(rule)
    recorder = Recorder(marks.names)
    with mode:
        states = [{kind: torch.zeros_like(fakes.params[n]) for kind in optimizers.state_names(rule)} for n in trained]
        _register(recorder, fakes)
        with ExitStack() as stack:
            stack.enter_context(_clear_errors(recorder))
            if explicit_attention:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # To the end of the backward: activation checkpointing runs parts of the forward again in it.
            stack.enter_context(_reparametrize_module(module, {**fakes.params, **fakes.buffers}, tie_weights=True))
            stack.enter_context(recorder.watch(module))
            stack.enter_context(device_forms(device))
            if device == "cuda":  # with autocast of the module's own, too
                stack.enter_context(as_on_cuda())
            stack.enter_context(recorder)
            with torch.set_grad_enabled(training), casting(autocast):
                result = _forward(module, fakes, loss_fn)
            _check_buffers(module, fakes)
            grads: Sequence[Tensor | None] = ()
            if training:
                _check_loss(result)
                recorder.phase = "backward"
                leaves = [fakes.params[name] for name in trained]
                # Held to the end of the step, as ``.grad`` holds them in eager.
                grads = _gradients(result, leaves)
                recorder.phase = "update"
                _register_states(recorder, trained, grads, states)
                with torch.no_grad():
                    optimizers.update(rule, dict(zip(trained, leaves, strict=True)), grads, states, marks.numbers)
            returned = [*_flat(result), *(g for g in grads if g is not None and rule.kind == "gradients")]
            outputs = tuple(recorder.value_of(t) for t in returned)
            deaths = recorder.deaths
    return Captured(
        graph=recorder.graph(outputs),
        deaths=deaths,
        numbers=recorder.numbers,
        parameters=trained,
        dtype=_main_dtype(module),
        rule=rule,
        graded=tuple(name for name, grad in zip(trained, grads, strict=False) if grad is not None),
    )


@dataclass(frozen=True)
class _Fakes:
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]


def _fakes(
    mode: FakeTensorMode,
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    trained: Sequence[str],
) -> _Fakes:
    """Fake copies of real tensors, sharing storages where the real ones do (tied weights, views)."""

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor.detach()
        return mode.from_tensor(tensor.detach(), static_shapes=True)

    return _Fakes(
        params={name: fake(p).requires_grad_(name in trained) for name, p in module.named_parameters()},
        buffers={name: fake(b) for name, b in module.named_buffers()},
        inputs=tuple(fake(t) for t in inputs),
        targets=tuple(fake(t) for t in targets),
    )


def _register(recorder: Recorder, fakes: _Fakes) -> None:
    for name, tensor in fakes.params.items():
        recorder.register(tensor, "parameter", f"parameter:{name}")
    for name, tensor in fakes.buffers.items():
        recorder.register(tensor, "buffer", f"buffer:{name}")
    for index, tensor in enumerate(fakes.inputs):
        recorder.register(tensor, "batch", f"input:{index}")
    for index, tensor in enumerate(fakes.targets):
        recorder.register(tensor, "batch", f"target:{index}")


def _register_states(
    recorder: Recorder,
    trained: Sequence[str],
    grads: Sequence[Tensor | None],
    states: Sequence[Mapping[str, Tensor]],
) -> None:
    """Optimizer state, of those parameters that have a gradient: torch's optimizers never make any for the others."""
    for name, grad, state in zip(trained, grads, states, strict=True):
        if grad is None:
            continue
        for kind, tensor in state.items():
            recorder.register(tensor, "state", f"state:{kind}:{name}")


def _forward(module: nn.Module, fakes: _Fakes, loss_fn: Callable[..., Tensor] | None) -> Any:
    if loss_fn is None:
        return module(*fakes.inputs)
    return loss_fn(module(*fakes.inputs), *fakes.targets)


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """``loss.backward()`` without the detour through function modes; the gradients, None where there is none.

    That detour would switch ``device_forms`` off during the backward, in which checkpointing runs forwards again.
    Gradients are accumulated as in eager, which copies those that are shared or laid out unlike their parameter.
    """
    root = torch.ones_like(loss, memory_format=torch.preserve_format)
    _engine_run_backward((loss,), (root,), False, False, (), allow_unreachable=True, accumulate_grad=True)
    return [leaf.grad for leaf in leaves]


def _fake_mode(tensors: Iterable[Tensor]) -> FakeTensorMode:
    """The mode of those that are fake already: two modes do not mix."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode()


def _check_tensors(module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    named = [
        *module.named_parameters(),
        *module.named_buffers(),
        *((f"input {i}", t) for i, t in enumerate(inputs)),
        *((f"target {i}", t) for i, t in enumerate(targets)),
    ]
    for name, tensor in named:
        problem = layout_problem(tensor)
        if problem:
            raise CaptureError(f"{name} is {problem}", hint=ONLY_DENSE)
        if tensor.device.type != "cpu":
            raise CaptureError(
                f"{name} is on device {tensor.device}",
                hint="pass the module and its batch on the CPU (module.cpu())",
            )
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    if len(dtypes) > 1:
        raise CaptureError(
            f"the parameters mix data types: {', '.join(dtypes)}",
            hint="convert the module with module.to(dtype)",
        )
    for name, tensor in named[len([*module.parameters(), *module.buffers()]) :]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtypes and name.startswith("input") and tensor.dtype.is_floating_point and dtype != dtypes[0]:
            raise CaptureError(
                f"{name} is {dtype} while the parameters are {dtypes[0]}",
                hint=f"convert it with .to(torch.{dtypes[0]})",
            )


def _check_buffers(module: nn.Module, fakes: _Fakes) -> None:
    for name, buffer in module.named_buffers():
        if buffer is not fakes.buffers.get(name):
            raise CaptureError(
                f"the forward replaces buffer {name!r}: the next step would not see that",
                hint="update it in place, with copy_ say",
            )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise CaptureError(
            f"the loss is not a single number but of {what}", hint="pass a loss_fn that returns a scalar"
        )
    if not loss.requires_grad:
        raise CaptureError("the loss does not depend on any trained parameter", hint=INFERENCE)


@contextmanager
def _clear_errors(recorder: Recorder) -> Iterator[None]:
    """Errors of the step as one line that says where; torch's own report of a failed fake call is held back."""
    chatter = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, chatter.disabled = chatter.disabled, True
    try:
        yield
    except CallError as error:
        raise CaptureError(f"{error} ({_place(recorder, error)})") from error
    except MagisError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the step depends on the data of a tensor ({error.func}) {_place(recorder, error)}",
            hint="replace the data-dependent branch or shape (torch.where, fixed shapes)",
        ) from error
    except Exception as error:
        raise CaptureError(
            f"{type(error).__name__} {_place(recorder, error)}: {error}",
            hint="the step must run eagerly before it can be captured",
        ) from error
    finally:
        chatter.disabled = was_disabled


def _place(recorder: Recorder, error: BaseException) -> str:
    """Sub-module, and file name and line of the innermost frame that belongs to neither torch nor capture."""
    here = Path(__file__).parent
    own = (Path(torch.__file__).parent, here, here.parent / "aten")
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in own)
    ]
    line = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"in module {recorder.module_of(error) or '(root)'!r}{line}"


def _flat(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for part in item.values():
            yield from _flat(part)
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from _flat(part)


def _main_dtype(module: nn.Module) -> str:
    for parameter in module.parameters():
        return str(parameter.dtype).removeprefix("torch.")
    return "float32"
