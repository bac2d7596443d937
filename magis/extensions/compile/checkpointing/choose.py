"""`magis.checkpoint_policy`: the choice of blocks to recompute, and of results to save in them, under a peak limit.

Every candidate is evaluated by capturing the whole step under it: torch's checkpointing runs on fake tensors, freed
exactly when real ones would be, so the peak is that of the real step. Blocks whose recomputation would give other
results are not checkpointed. Candidates follow from one price: an operator's result is saved if recomputing it takes
more nanoseconds than its bytes times the price. The price is bisected; then blocks are excluded from checkpointing, the
last block first, while the limit holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from magis.capture import Captured, OptimizerSpec, Workload, capture
from magis.capture.refusals import check_parts, check_tensors
from magis.capture.side_effects import DrawError, check_stateless, observe_step
from magis.capture.workload import as_batch, own_loss, with_keywords, with_loss, with_targets
from magis.errors import CaptureError, UsageError, nearest
from magis.extensions.compile.checkpointing.policy import (
    LIBRARIES,
    REMAT,
    TORCH,
    CheckpointedRegion,
    RegionPolicies,
)
from magis.extensions.compile.checkpointing.remat_regions import leaves, torch_remat
from magis.extensions.compile.checkpointing.repetition import Runs, drawing, under
from magis.frontends.limits import AUTOCAST, limits_of
from magis.graph import PERSISTENT_KINDS, Op
from magis.models.step_parts import ORDER, in_one_order, live_parts
from magis.planner.subject import Subject
from magis.planner.workload_source import Source
from magis.rewrite.realize import GENERATOR_BYTES
from magis.runtime.measure import collector_spared
from magis.units import format_bytes

__all__ = ["checkpoint_policy"]

TRIES = 24
"""Maximum number of captures."""


@dataclass(frozen=True)
class _Item:
    """Result that may be saved in a block: its key, its bytes, and the time to recompute it in nanoseconds."""

    path: str
    key: tuple[str, int] | str
    """Operator name and its index among calls of that name; for torch_remat, the path of a sub-module."""
    nbytes: int
    ns: int

    @property
    def worth(self) -> float:
        """Recomputation time per saved byte, in nanoseconds; infinite if saving takes no memory."""
        return self.ns / self.nbytes if self.nbytes else float("inf")


@dataclass(frozen=True)
class _Judged:
    regions: tuple[CheckpointedRegion, ...]
    peak: int
    ns: int


@in_one_order("magis.checkpoint_policy", ORDER, {"loss_fn": "loss"})
def checkpoint_policy(
    module: nn.Module | tuple[Any, ...] | Callable[[], object],
    batch: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: object = None,
    *,
    memory_ratio: float | None = None,
    memory_limit: str | int | None = None,
    blocks: Sequence[str] | None = None,
    library: Literal["torch", "torch_remat"] = "torch",
    autocast: torch.dtype | None = None,
) -> RegionPolicies:
    """Return a policy of selective activation checkpointing under which forward and backward of `module` meet a limit.

    `batch` is `(inputs, targets)` or a dictionary of the model's keywords, as for `magis.optimize`; with `loss` None
    the module returns its loss; the optimizer is ignored. The limit is `memory_ratio` (share of the peak without
    checkpointing) or `memory_limit` (bytes, or "8 GiB"); peaks count parameters, buffers, batch and gradients, but not
    the optimizer's state. `blocks` are the paths of the sub-modules that may be recomputed; default: the children of
    lists and sequences of layers. `library` is the library that will run the policy: `torch.utils.checkpoint`, which
    saves results of operators, or `torch_remat`, which saves calls of sub-modules.

    The module is not changed. Raises UsageError for invalid arguments and for limits that no policy meets, CaptureError
    for a step that is not a single static graph.
    """
    if (memory_ratio is None) == (memory_limit is None):
        raise UsageError("a policy needs memory_ratio or memory_limit, and not both")
    if library not in LIBRARIES:
        raise UsageError(f"library={library!r}", hint=f"use {' or '.join(map(repr, LIBRARIES))}")
    if autocast not in AUTOCAST:
        raise UsageError(f"autocast to {autocast}", hint="use torch.bfloat16 or torch.float16")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError("checkpoint_policy was called under torch.autocast", hint="leave that out, and pass autocast=")
    if library == REMAT:
        torch_remat()  # raises UsageError if it is not installed
    limits = limits_of({"memory_ratio": memory_ratio, "memory_limit": memory_limit})
    parts = live_parts("magis.checkpoint_policy", module, batch, loss, optimizer)
    check_parts(parts.module, parts.loss, parts.optimizer)
    net: nn.Module = parts.module
    given = as_batch(parts.batch)
    whole, loss_fn = with_loss(net, parts.loss)
    work = Workload(
        f"{type(net).__module__}:{type(net).__qualname__}",
        with_keywords(whole, given),
        given.inputs,
        given.targets,
        with_targets(loss_fn, given) or own_loss,
        OptimizerSpec("gradients"),
    )
    paths = tuple(blocks) if blocks is not None else blocks_of(net)
    with collector_spared():
        search = _PolicySearch(net, work, paths, library, autocast)
        best = search.run(limits.bytes_of(search.plain.peak) or 0)
    ratio = best.ns / max(1, search.plain.ns)
    return RegionPolicies(best.regions, search.plain.peak, best.peak, ratio, library, tuple(search.left.items()))


def blocks_of(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the layers: children of the outermost lists and sequences that have sub-modules themselves.

    Raises UsageError if there are none.
    """
    found: list[str] = []
    for path, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and not any(f"{path}.".startswith(f"{p}.") for p in found):
            children = [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]
            found += [name for name, child in children if any(True for _ in child.children())]
    if not found:
        raise UsageError(
            "the module has no lists or sequences of layers with parts of their own",
            hint='group its layers, nn.Sequential(nn.Sequential(...), ...), or name some: blocks=["0", "2"]',
        )
    return tuple(found)


class _PolicySearch:
    """Search for a checkpointing policy of one training step."""

    def __init__(
        self, module: nn.Module, work: Workload, blocks: Sequence[str], library: str, autocast: torch.dtype | None
    ) -> None:
        for path in blocks:
            try:
                module.get_submodule(path)
            except AttributeError:
                names = [name for name, _ in module.named_modules() if name]
                raise UsageError(f"the module has no block {path!r}", hint=nearest(path, names)) from None
        device = next((p.device.type for p in module.parameters()), "cpu")
        if device != "cpu":
            raise UsageError(
                f"the module lies on {device!r}", hint="plan with its copy on the CPU: copy.deepcopy(m).cpu()"
            )
        check_tensors(work.module, work.inputs, work.targets)
        self._module = module
        self._library = library
        self._work = work
        self._subject = Subject(Source(work.name, lambda _seed: work, AUTOCAST[autocast], device, 0))
        self._autocast = None if autocast is None else str(autocast).removeprefix("torch.")
        self._tries = 0
        try:
            reads = observe_step(work, self._autocast)
        except DrawError:  # outside of blocks that may run again, that does no harm
            reads = observe_step(work, self._autocast, draws=True)
        check_stateless(reads)
        self.left: dict[str, str] = {}
        """Blocks that are not checkpointed, with the reasons."""
        with drawing(module, blocks, self.left):
            self._plain = self._captured(())
        self.plain = self._judge((), self._plain)
        self._items = self._candidates(blocks)
        self._paths = tuple(dict.fromkeys(item.path for item in self._items))

    def run(self, limit: int) -> _Judged:
        """Return the cheapest policy found under a limit in bytes. Raises UsageError if there is none."""
        if self.plain.peak <= limit:
            return self.plain
        prices = sorted({item.worth for item in self._items if item.nbytes})
        low, high, best = 0, len(prices), self._at(float("inf"))
        if best.peak > limit:
            raise UsageError(
                f"no policy keeps {format_bytes(limit)}: with all {len(self._paths)} blocks recomputed"
                f" {format_bytes(best.peak)} are needed, plain {format_bytes(self.plain.peak)}",
                hint="raise the limit, or name other blocks",
            )
        while low < high:  # the lowest price, at which most is saved, that keeps the limit
            middle = (low + high) // 2
            found = self._at(prices[middle])
            if found.peak <= limit:
                best, high = min(best, found, key=lambda each: each.ns), middle
            else:
                low = middle + 1
        best = self._mixed(prices, low, limit, best)
        for region in reversed(best.regions):
            if self._tries >= TRIES:
                break
            rest = tuple(each for each in best.regions if each is not region)
            found = self._tried(rest)
            if found.peak <= limit and found.ns <= best.ns:
                best = found
        return best

    def _mixed(self, prices: Sequence[float], low: int, limit: int, best: _Judged) -> _Judged:
        """Lower the price to the next value for as many blocks as fit, beginning with the last block.

        Blocks mostly have the same operators, so one price for all blocks changes the peak in large steps.
        """
        if not 0 < low < len(prices):
            return best
        few, many = 0, len(self._paths)
        while many - few > 1:
            middle = (few + many) // 2
            found = self._at(prices[low], prices[low - 1], frozenset(self._paths[-middle:]))
            if found.peak <= limit:
                best, few = min(best, found, key=lambda each: each.ns), middle
            else:
                many = middle
        return best

    def _at(self, price: float, other: float = 0.0, others: frozenset[str] = frozenset()) -> _Judged:
        """Evaluate the policy that recomputes all blocks and saves results worth more than a price (ns per byte); the
        blocks ``others`` have the price ``other``."""
        regions = {path: CheckpointedRegion(path) for path in self._paths}
        for item in self._items:
            if not item.nbytes or item.worth > (other if item.path in others else price):
                region = regions[item.path]
                regions[item.path] = (
                    replace(region, modules=region.modules | {item.key})
                    if isinstance(item.key, str)
                    else replace(region, saved=region.saved | {item.key})
                )
        return self._tried(tuple(regions.values()))

    def _tried(self, regions: tuple[CheckpointedRegion, ...]) -> _Judged:
        return self._judge(regions, self._captured(regions))

    def _judge(self, regions: tuple[CheckpointedRegion, ...], captured: Captured) -> _Judged:
        # every block keeps the generator's state for its repetition; capture draws no random numbers and sees none.
        # torch_remat also saves a state after each saved call, and one during a recomputation.
        states = sum(1 + len(region.modules) for region in regions) + (self._library == REMAT and bool(regions))
        peak = self._subject.simulate(captured).peak_bytes + GENERATOR_BYTES * states
        return _Judged(regions, peak, self._subject.latency_ns(captured.graph))

    def _captured(self, regions: Sequence[CheckpointedRegion], seen: Mapping[str, Runs] | None = None) -> Captured:
        self._tries += 1
        with under(self._module, regions, self._library, seen):
            return capture(*self._work.parts, autocast=self._autocast)

    def _candidates(self, blocks: Sequence[str]) -> list[_Item]:
        """Return the results that may be saved in each block that runs once per step and can be recomputed."""
        where = next(path for path, part in self._work.module.named_modules() if part is self._module)
        prefix = f"{where}." if where else ""
        inside: dict[str, list[Op]] = {}
        for path in blocks:
            inner = f"{prefix}{path}."
            ops = [op for op in self._plain.graph.ops if op.phase == "forward" and f"{op.module}.".startswith(inner)]
            if path not in self.left and ops and not (why := self._why_not_again(ops)):
                inside[path] = ops
            elif path not in self.left:
                self.left[path] = why if ops else "it does not run"
        seen = {path: Runs() for path in inside}

        def forget(*_: object) -> None:
            for runs in seen.values():
                runs.forget()

        begins = self._work.module.register_forward_pre_hook(forget)  # a capture may try twice
        try:
            self._captured([CheckpointedRegion(path) for path in inside], seen)
        except (CaptureError, RuntimeError) as error:
            if self._library == TORCH and not isinstance(error, CaptureError):
                raise
            raise self._no_repetition(error) from None
        finally:
            begins.remove()
        found: list[_Item] = []
        for path, ops in inside.items():
            runs = seen[path]
            if runs.calls != 1 or not runs.alike():
                self.left[path] = (
                    f"it runs {runs.calls} times" if runs.calls != 1 else "its repetition computes otherwise"
                )
            else:
                by_library = self._items_of if self._library == TORCH else self._modules_of
                found += by_library(path, ops, Counter(runs.names))
        if not found:
            reasons = "; ".join(f"{path}: {why}" for path, why in [*self.left.items()][:3])
            raise UsageError(
                f"none of the blocks runs once per step and can be recomputed ({reasons})",
                hint="name others: blocks=[...]",
            )
        return found

    def _no_repetition(self, error: Exception) -> UsageError:
        """Return the error for a step that can be captured, but not with its blocks recomputed."""
        if getattr(getattr(self._module, "config", None), "use_cache", False):
            return UsageError(
                "the blocks keep keys and values for later calls, and cannot be recomputed",
                hint="set model.config.use_cache = False, which changes nothing in training",
            )
        text = " ".join(str(error).split()).partition(". ")[0]
        return UsageError(f"the blocks cannot be recomputed: {text}", hint="name others: blocks=[...]")

    def _why_not_again(self, ops: Sequence[Op]) -> str:
        """Return the reason why a block cannot be recomputed; "" if it can.

        A block must not write to tensors made outside it, nor read tensors that are changed later in-place, since its
        recomputation would read the new contents.
        """
        graph = self._plain.graph
        maker = {graph.values[value].storage: op.id for op in reversed(graph.ops) for value in op.made()}
        last = {pair[0]: pair[1] for op in graph.ops for pair in op.writes}
        ids = {op.id for op in ops}
        for op in ops:
            written = {storage for storage, _ in op.writes}
            kinds = {graph.storages[storage].kind for storage in written}
            others = {s for s in written if graph.storages[s].kind == "temporary" and maker.get(s) not in ids}
            early = any(
                storage not in written and version != last.get(storage, 0)
                for storage, version in op.reads
                if (kind := graph.storages[storage].kind) in PERSISTENT_KINDS
                or (kind == "temporary" and maker.get(storage) not in ids)
            )
            if others or kinds & {"parameter", "batch"}:
                return "it writes over memory that others made"
            if early:
                return "it reads what is changed afterwards"
        return ""

    def _items_of(self, path: str, ops: Sequence[Op], ran: Mapping[str, int]) -> Iterator[_Item]:
        graph = self._plain.graph
        written = {storage for op in graph.ops for storage, _ in op.writes}
        ids = {op.id for op in ops}
        leaving = {
            graph.values[value].storage
            for op in graph.ops
            if op.phase == "forward" and op.id not in ids
            for value in op.inputs()
        }
        counted: Counter[str] = Counter()
        for op in ops:
            number = counted[op.target]
            counted[op.target] += 1
            taken = {graph.values[value].storage for value in op.inputs()}
            fresh = {graph.values[value].storage for value in op.made()} - taken
            if op.random or op.writes or not fresh or fresh & written:
                continue
            if ran.get(op.target) != sum(other.target == op.target for other in ops):
                continue  # torch counts other calls of that name
            nbytes = sum(graph.storages[storage].nbytes for storage in fresh - leaving)
            yield _Item(path, (op.target, number), nbytes, self._subject.roofline.nanoseconds(op, graph.values))

    def _modules_of(self, path: str, ops: Sequence[Op], ran: Mapping[str, int]) -> Iterator[_Item]:
        """Yield the leaf modules of a block that run once and write only to their own buffers.

        A saved call occupies its result and its inputs, except for parameters, buffers and the batch.
        """
        graph = self._plain.graph
        block = self._module.get_submodule(path)
        where = next(name for name, part in self._work.module.named_modules() if part is block)
        for name in leaves(block):
            inside = [op for op in ops if op.module == f"{where}.{name}"]
            made = {graph.values[value].storage for op in inside for value in op.made()}
            written = {storage for op in inside for storage, _ in op.writes}
            foreign = {each for each in written - made if graph.storages[each].kind != "buffer"}
            if ran.get(name) != 1 or not inside or foreign:
                continue
            met = {graph.values[value].storage for op in inside for value in op.inputs()}
            stays = {each for each in met | made if graph.storages[each].kind == "temporary"}
            ns = sum(self._subject.roofline.nanoseconds(op, graph.values) for op in inside)
            yield _Item(path, name, sum(graph.storages[each].nbytes for each in stays), ns)
