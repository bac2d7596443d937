"""Check of a forward before a pipeline runs it in stages: the hidden state alone may go from stage to stage.

The forward is run once as a whole, on one micro-batch, and each operator is seen. Results of modules in front of the
blocks, and of the blocks, are noted with all that is computed from them. At each block all of these but the hidden
state that it is given are left behind: a later stage will not have them. A forward is refused if

    it reads later what was left behind    x = x + x0, where x0 came before the blocks
    it computes between two blocks         every later stage would do it again
    a block returns anything but a tensor, or they do not run once each and in order
    parts are used on another side of the blocks than the plan says
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from magis.capture import Workload
from magis.capture.schemas import tensors_in, written_by
from magis.errors import UsageError
from magis.extensions.ranks.strategies.stage_cuts import StageCut, exchanged, lies_in

_SIZES_ONLY = ("_like", "aten::new_", "aten::sym_")
"""Parts of the names of operators that read sizes and types, and no numbers."""


def check_flow(work: Workload, cut: StageCut, inputs: tuple[Tensor, ...]) -> None:
    """Run the whole forward once; raises UsageError if its stages would compute something else. Buffers stay."""
    net: Any = work.module
    flow = _Flow(work, cut)
    buffers = [(buffer, buffer._version, buffer.clone()) for buffer in net.buffers()]
    forwards: dict[str, Callable[..., Any]] = {}
    for path in cut.starts:
        forwards[path] = partial(flow.run_start, path, net.get_submodule(path).forward)
    for index, path in enumerate(cut.blocks):
        forwards[path] = partial(flow.run_block, index, net.get_submodule(path).forward)
    with exchanged(net, forwards), flow:
        type(net).forward(net, *inputs)
    if flow.done < len(cut.blocks):
        flow.refuse(f"leaves out {cut.blocks[flow.done]}")
    for buffer, version, before in buffers:
        if buffer._version != version:
            buffer.copy_(before)


class _Flow(TorchDispatchMode):
    """Dispatch mode that follows what is computed from modules on one side of a block to the other."""

    supports_higher_order_operators = True

    def __init__(self, work: Workload, cut: StageCut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work, self._cut = work, cut
        self.done = 0
        """Number of blocks that have run."""
        self._in_block = False
        self._hidden: Tensor | None = None
        """Output of the last block."""
        self._origins: dict[int, tuple[StorageWeakRef, str]] = {}
        """Storages that depend on a stage, each with the path of the part that it comes from."""
        self._left: set[int] = set()
        """Those among them that the stage of the running block, or the finish, does not have."""
        self._behind: dict[int, str] = {}
        """Storages of parameters that the last stage alone has, with their paths."""
        for name, parameter in work.module.named_parameters(remove_duplicate=False):
            if name in cut.tied or lies_in(name, cut.blocks):
                continue
            if lies_in(name, cut.starts):
                self._note([parameter], name)
            else:
                self._behind[_key(parameter)] = name

    def refuse(self, what: str) -> NoReturn:
        """Raise UsageError: the forward does this."""
        raise UsageError(
            f"{self._work.name}: the forward of {type(self._work.module).__name__} {what}; a pipeline hands one hidden "
            "state from block to block, and nothing else",
            hint="change the forward or the pp_plan, or use tp, ddp, fsdp or zero",
        )

    def run_start(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module in front of the blocks."""
        if self.done or self._in_block:
            self.refuse(f"runs {path} behind {self._cut.blocks[0]}, and the plan has it in front")
        out = forward(*args, **kwargs)
        self._note(_tensors(out), path, anew=True)
        return out

    def run_block(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block."""
        path = self._cut.blocks[index]
        if index != self.done or self._in_block:
            self.refuse(f"runs {path} out of turn")
        given = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(given, Tensor) or (index and given is not self._hidden):
            before = self._cut.blocks[index - 1] if index else "what is in front"
            self.refuse(f"gives {path} something else than the tensor that {before} returns")
        self._left = set(self._origins) - {_key(given)}
        self._in_block = True
        out = forward(*args, **kwargs)
        self._in_block = False
        if not isinstance(out, Tensor):
            self.refuse(f"has {path} return a {type(out).__name__}")
        self._note([out], path, anew=True)
        self.done, self._hidden = index + 1, out
        if self.done == len(self._cut.blocks):
            self._left = set(self._origins) - {_key(out)}
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs or {}))
        name = getattr(getattr(func, "_schema", None), "name", "")
        if any(part in name for part in _SIZES_ONLY):
            return func(*args, **(kwargs or {}))
        read = {key: self._origins[key][1] for each in given if (key := _key(each)) in self._origins}
        between = 0 < self.done < len(self._cut.blocks) and not self._in_block
        for key, origin in read.items():
            if key in self._left:
                self.refuse(f"reads what comes from {origin} behind {self._place()}")
            if between:
                self.refuse(f"computes with the hidden state between {self._place()} and the next block")
        for each in given:
            if self.done < len(self._cut.blocks) and (early := self._behind.get(_key(each))):
                self.refuse(f"uses {early} in front of {self._cut.blocks[-1]}, and the plan has it behind")
        out = func(*args, **(kwargs or {}))
        if read:
            self._note(_tensors(out), next(iter(read.values())))
            if name:  # operators of higher order have no schema
                self._note(_tensors(written_by(func, args, kwargs or {})), next(iter(read.values())))
        return out

    def _place(self) -> str:
        blocks = self._cut.blocks
        return blocks[self.done] if self._in_block else blocks[self.done - 1]

    def _note(self, tensors: Iterable[Tensor], origin: str, *, anew: bool = False) -> None:
        """Note storages as coming from ``origin``, also those with another one if ``anew``."""
        for tensor in tensors:
            reference: StorageWeakRef = StorageWeakRef(tensor.untyped_storage())
            if anew or reference.cdata not in self._origins:
                self._origins[reference.cdata] = (reference, origin)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tensors_in(tree) if each.layout == torch.strided]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
