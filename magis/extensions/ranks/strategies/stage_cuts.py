"""Cuts of networks into pipeline stages, by the networks' own plans.

A stage runs blocks; the first stage also runs the layers before them (embeddings), the last the layers after them
(heads). Stages exchange only the hidden state. `pp_plan` names the layers before the blocks and the list of blocks.

A network that is written in stages, with `start(*inputs)`, `block(index, hidden)` and `finish(hidden)`, is run by
these. Of any other the whole forward is run, with the inputs, on every stage. There the modules of earlier stages do
not compute: each returns the hidden state that came from the stage before. At the first block of the next stage the
forward is left. So masks and positions, which a forward makes for its blocks, are made on every stage. Forwards for
which this is not the same are refused (`stage_flow.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from magis.capture import Workload
from magis.errors import UsageError
from magis.extensions.ranks.strategies.model_plans import plan_of, written_in_stages


@dataclass(frozen=True)
class StageCut:
    """Parts of a network in execution order."""

    starts: tuple[str, ...]
    """Paths of modules and parameters before the blocks."""
    blocks: tuple[str, ...]
    tied: tuple[str, ...]
    """Names of a parameter shared by layers before and after the blocks; both end stages hold a copy."""
    in_methods: bool
    """True if the network has `start`, `block` and `finish`; otherwise every stage needs the inputs."""


def cut_of(work: Workload, stages: int, ranks: int | None = None) -> StageCut:
    """Return the cut of the network of ``work``. Raises UsageError if it has no plan or too few blocks.

    ``ranks``: number of ranks that hold the stages, if not one stage each.
    """
    net, kind = work.module, type(work.module).__name__
    plan = plan_of(net, "pp_plan")
    parts = dict(net.named_modules())
    lists = [path for path in plan if isinstance(parts.get(path), (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    if len(lists) != 1:
        raise UsageError(
            f"{work.name}: pipeline stages need to know where to cut, and {kind} "
            + (f"names several lists of blocks: {', '.join(lists)}" if lists else "says nothing"),
            hint="give it a pp_plan, as Hugging Face's configurations have it; or use ddp, fsdp or zero",
        )
    blocks = tuple(f"{lists[0]}.{name}" for name, _ in parts[lists[0]].named_children())
    # what takes the hidden state is behind the blocks, all else in front of them
    (_, (hidden, *_)) = plan[lists[0]]
    starts = tuple(path for path, (takes, _) in plan.items() if path != lists[0] and hidden not in takes)
    finishes = tuple(path for path, (takes, _) in plan.items() if path != lists[0] and hidden in takes)
    in_methods = written_in_stages(net, len(work.inputs))
    named = dict(net.named_parameters(remove_duplicate=False))
    if not in_methods and (bare := [path for path in starts if path in named]):
        raise UsageError(
            f"{work.name}: {kind} has the parameter {bare[0]} in front of its blocks, and pp passes over modules alone",
            hint="put it into a module of its own, and name that in the pp_plan",
        )
    strange = [name for name in named if not lies_in(name, (*starts, *blocks, *finishes))]
    if strange and not in_methods:
        raise UsageError(
            f"{work.name}: the pp_plan of {kind} does not say on which stage {strange[0]} is",
            hint="name its module in the plan",
        )
    in_front = {id(p) for name, p in named.items() if lies_in(name, starts)}
    shared = {id(p) for name, p in named.items() if lies_in(name, finishes)} & in_front
    tied = tuple(name for name, p in named.items() if id(p) in shared)
    if len(shared) > 1:
        raise UsageError(f"{work.name}: {', '.join(tied)} are shared by both ends of {kind}; pp copies one weight")
    if stages > (most := len(blocks)):
        each = stages // (ranks or stages)  # on a rank
        plain = f", or the {ranks} stages of pp{ranks}" if each > 1 and ranks and ranks <= most else ""
        raise UsageError(
            f"{work.name}: {most} blocks cannot be cut into {stages} stages"
            + (f", {each} on each of {ranks} ranks" if each > 1 else ""),
            hint=f"take a network of at least {stages} blocks{plain}" if each > 1 else f"ask for at most {most} stages",
        )
    return StageCut(starts, blocks, tied, in_methods)


def lies_in(name: str, places: tuple[str, ...]) -> bool:
    """Return True if a path is one of these places, or below one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def stage_blocks(count: int, stages: int, stage: int) -> range:
    """Return the indices of the blocks of a stage: equal counts, with one more in the first stages if necessary."""
    each, over = divmod(count, stages)
    first = stage * each + min(stage, over)
    return range(first, first + each + (stage < over))


def keep_stages(work: Workload, cut: StageCut, stages: int, held: Collection[int]) -> None:
    """Set to None the parameters that none of the stages ``held`` needs; names and modules remain."""
    count = len(cut.blocks)
    own = tuple(cut.blocks[index] for stage in held for index in stage_blocks(count, stages, stage))
    first, last = 0 in held, stages - 1 in held
    for name in [name for name, _ in work.module.named_parameters(remove_duplicate=False)]:
        if lies_in(name, cut.blocks):
            kept = lies_in(name, own)
        elif name in cut.tied:
            kept = first or last
        else:
            kept = first if lies_in(name, cut.starts) else last
        if not kept:
            owner, _, leaf = name.rpartition(".")
            module: nn.Module = work.module.get_submodule(owner)
            module._parameters[leaf] = None


def run_stage(
    net: Any, cut: StageCut, blocks: range, inputs: tuple[Tensor, ...], hidden: Tensor | None = None, *, last: bool
) -> Any:
    """Run the blocks of a stage, on the hidden state of the previous stage, or on the inputs if that is None.

    Returns the next hidden state; in the ``last`` stage the output of the network.
    """
    if cut.in_methods:
        x = net.start(*inputs) if hidden is None else hidden
        for index in blocks:
            x = net.block(index, x)
        return net.finish(x) if last else x
    forwards: dict[str, Callable[..., Any]] = {}
    if hidden is not None:
        forwards |= dict.fromkeys(cut.starts, lambda *_args, **_kwargs: hidden.detach())
        forwards |= dict.fromkeys(cut.blocks[: blocks[0]], lambda *_args, **_kwargs: hidden)
    if not last:
        forwards[cut.blocks[blocks[-1] + 1]] = _leave
    with exchanged(net, forwards):
        try:
            return type(net).forward(net, *inputs)
        except _LeftForward as left:
            return left.hidden


class _LeftForward(Exception):  # noqa: N818  (no error)
    """Raised to abort the forward of a network at the end of a stage; carries the hidden state."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _leave(*args: Any, **kwargs: Any) -> None:
    """Abort the forward at the block after a stage, whose forward this replaces."""
    given = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(given, Tensor):
        raise UsageError(f"a block takes a {type(given).__name__} where pp expects a hidden state")
    raise _LeftForward(given)


@contextmanager
def exchanged(net: nn.Module, forwards: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Exchange the forwards of some modules for the duration of a block."""
    parts = [(vars(net.get_submodule(path)), forward) for path, forward in forwards.items()]
    before = [own.get("forward") for own, _ in parts]
    try:
        for own, forward in parts:
            own["forward"] = forward
        yield
    finally:
        for (own, _), old in zip(parts, before, strict=True):
            del own["forward"]
            if old is not None:
                own["forward"] = old
