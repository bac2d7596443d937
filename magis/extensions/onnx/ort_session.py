"""Session of ONNX Runtime that runs a training step on torch's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnx import ModelProto
from torch import Tensor, nn

from magis.errors import MagisError, UsageError
from magis.extensions.onnx.export import Exported, Port
from magis.extensions.onnx.functional_trace import NEW
from magis.extensions.onnx.writer import ELEMENT
from magis.ops import optimizers
from magis.ops.averages import is_share
from magis.ops.optimizers import OptimizerSpec
from magis.runtime.time_slices import TimeSlice

_FATAL = 4
_MISSING = re.compile(r"implementation for (\w+)\(")


def ort_version() -> str:
    """Return ONNX Runtime's version; other versions optimize graphs differently and need other scratch memory."""
    return str(onnxruntime.__version__)


def open_session(
    model: ModelProto, *, optimized: bool, name: str, optimized_path: Path | None = None, profile: Path | None = None
) -> Any:
    """Open a session of a model on the CPU, without log output; ``optimized``: with all graph optimizations, else none.

    ``optimized_path``: file to save the final graph to. ``profile``: prefix of the profiles' file names. Raises
    UsageError if the CPU has no kernel for an operator.
    """
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    options.enable_mem_pattern = (
        False  # all tensors of a step in one block: larger, and the arena then holds twice as much
    )
    # threads that spin while they wait slow down whatever else is timed, as OpenMP's would (magis/quiet.py)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of a module without public names
        found = _MISSING.search(str(error))
        if found is None:
            raise MagisError(f"{name}: ONNX Runtime does not load its step: {error}") from error
        raise UsageError(
            f"{name}: ONNX Runtime {ort_version()} has no kernel for {found[1]} in a data type of this step on the CPU",
            hint="bfloat16 has none for most operators: use float32 or float16",
        ) from error


class OrtStep:
    """Step in ONNX Runtime that reads and writes torch's tensors without copies.

    A new weight or optimizer state cannot overwrite the old one, which later operators may read; so there are two
    tensors of each, and after every step the module has the one written last.
    """

    def __init__(
        self,
        exported: Exported,
        module: nn.Module,
        batch: Mapping[str, Tensor],
        rule: OptimizerSpec,
        *,
        optimized: bool,
        name: str,
    ) -> None:
        """``batch``: tensors of the step by name ("input:0", "target:0")."""
        self.module = module
        self.generators: Mapping[str, torch.Generator] = {}  # random numbers are ONNX Runtime's own
        self._rule = rule
        self._steps = 0
        self._name = name
        if any(map(is_share, exported.scalars)):
            raise UsageError(
                f"{name}: a batch norm averages over all batches (momentum=None), which this strategy does not count",
                hint="give it a momentum",
            )
        self._session = open_session(exported.model, optimized=optimized, name=name)
        self._owners: dict[str, Tensor] = {f"parameter:{name}": p for name, p in module.named_parameters()}
        self._owners.update((f"buffer:{name}", b) for name, b in module.named_buffers())
        self._scalars = {name: torch.zeros((), dtype=torch.float32) for name in exported.scalars}
        now = {port.name: self._bind(port, batch) for port in exported.inputs}
        made = {port.name: torch.empty(port.shape, dtype=port.dtype) for port in exported.outputs}
        self._returned = tuple(tensor for name, tensor in made.items() if not name.startswith(NEW))
        # what a step makes is the input of the next one, which writes over the input of the last one
        changing = {name.removeprefix(NEW): tensor for name, tensor in made.items() if name.startswith(NEW)}
        now_next = {**now, **changing}
        made_next = {**made, **{NEW + name: now[name] for name in changing}}
        self._inputs = (now, now_next)
        self._changing = tuple(changing)
        self._bindings = tuple(
            bind(self._session, {**given, **self._scalars}, results)
            for given, results in ((now, made), (now_next, made_next))
        )
        self._outputs: tuple[Tensor, ...] = ()

    def _bind(self, port: Port, batch: Mapping[str, Tensor]) -> Tensor:
        kind = port.name.partition(":")[0]
        if kind == "state":
            return torch.zeros(port.shape, dtype=port.dtype)
        owner = self._owners.get(port.name)
        tensor = (batch[port.name] if owner is None else owner).detach()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
            if owner is not None:
                owner.data = tensor
        return tensor

    def prepare(self) -> None:
        """Free the results of the last step, which leaves no gradients."""
        self._outputs = ()

    def run(self) -> Tensor:
        """Run one step, and return the loss, or the first output of an inference, which the next step overwrites."""
        self._steps += 1
        numbers = optimizers.scalars(self._rule, self._steps)
        for name, tensor in self._scalars.items():
            tensor.fill_(numbers[name])
        try:
            self._session.run_with_iobinding(self._bindings[(self._steps - 1) % 2])
        except RuntimeError as error:
            raise MagisError(f"{self._name}: ONNX Runtime failed in its step: {error}") from error
        for name in self._changing:
            owner = self._owners.get(name)
            if owner is not None:
                owner.data = self._inputs[self._steps % 2][name]
        self._outputs = self._returned
        return self._outputs[0] if self._rule.kind == "none" else self._outputs[0].clone()

    def run_in_turns(self, turn: TimeSlice) -> Tensor:
        """Run the whole step in one time slice, since ONNX Runtime runs it in one call."""
        result = self.run()
        turn()
        return result

    def results(self) -> tuple[Tensor, ...]:
        """Return the last step's loss, or all outputs of an inference; the next step overwrites them."""
        return self._outputs

    def state(self) -> Mapping[str, Tensor]:
        """Return the optimizer state by name: "exp_avg:layer.weight"."""
        now = self._inputs[self._steps % 2]
        return {name.partition(":")[2]: each for name, each in now.items() if name.startswith("state:")}


def bind(session: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    """Bind contiguous tensors to a session's inputs and outputs by name; the tensors must outlive the binding."""
    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cpu", 0, ELEMENT[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    for name, tensor in outputs.items():
        binding.bind_output(name, "cpu", 0, ELEMENT[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())
    return binding
