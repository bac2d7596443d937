"""Stretches of a plan: operators that run one after another and can be compiled as one function.

A plan keeps its own actions: parts of loops, swaps, saved generators, collectives. Operators that torch's own kernels
compute best (products, convolutions, attention, pools), that draw random numbers or that may raise stay as they are.
What lies between two of these is split into stretches that share no memory, so layers alike have stretches alike, and
so have weights alike.

Within a stretch memory is the compiler's: a tensor that only its own operators use may never exist. What it writes of
memory that exists before, it writes in place. Views that later operators use are made again behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from magis.graph import Arg, Const, Graph, Op, Ref, Value
from magis.graph.hazards import fills, is_dense, is_pure_view
from magis.graph.loop_rules import MERGES, PART
from magis.ops.call import shaped_by_contents
from magis.ops.fake_results import IN_TRAINING
from magis.ops.operators import op_info

LEAST = 2
"""Fewest operators, views not counted, that are worth a compiled function."""
NUMBERS = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"})
"""Data types of the tensors in a stretch."""
_OWN_KERNELS = ("matmul", "conv", "attention", "attention_backward", "random", "pool")
"""Kinds of operators whose kernels are torch's own in compiled code, too, or (pools) are several times faster."""
_ALONE = ("native_layer_norm",)
"""Operators whose compiled code is faster than torch's kernel even alone."""
_NUMBERED = ("mul", "div", "add", "sub", "addcdiv", "addcmul", "lerp")
"""Operators that take a number which is known only when the step runs."""
_STAYS = (
    "native_group_norm",
    "as_strided",
    "set_",
    "resize_",
    "alias",
    "_foreach",
    "_fused",
    "_local_scalar_dense",
    "_assert",
)


@dataclass
class FusedStretch:
    """Operators that are compiled as one function, and what passes between them and the rest of the plan."""

    ops: list[Op]
    inputs: list[int] = field(default_factory=list)
    """Values that it reads or writes, made before it."""
    again: dict[int, tuple[Op | None, int]] = field(default_factory=dict)
    """Further values from before on memory that it writes: made again from others, by a view or (None) as they are."""
    outputs: list[int] = field(default_factory=list)
    """Values on new memory that later operators use."""
    behind: list[Op] = field(default_factory=list)
    """Views of inputs and outputs that later operators use."""
    numbers: list[str] = field(default_factory=list)
    """Names of the numbers that are known only when the step runs."""
    freed: list[int] = field(default_factory=list)
    """Inputs whose memory nobody uses afterwards."""
    given: list[int] = field(default_factory=list)
    """Those of them that are all of a storage: results may take their memory."""

    def key(self, graph: Graph) -> str:
        """Return a text that is equal for stretches that one function can compute, with as many bytes of scratch."""
        values = graph.values
        names = {value: number for number, value in enumerate(self.inputs)}
        lines = [str([(values[each].shape, values[each].stride, values[each].dtype) for each in self.inputs])]
        for value, (op, base) in self.again.items():
            lines.append(_line(op, names) if op is not None else f"same {names[base]}")
            names[value] = len(names)
        for op in self.ops:
            lines.append(_line(op, names))
            names.update((value, len(names) + number) for number, value in enumerate(op.made()))
        lines.append(str([[names[each] for each in some] for some in (self.outputs, self.freed, self.given)]))
        ends = [values[value].storage for value in self.freed]
        lines.append(str([(ends.index(storage), graph.storages[storage].nbytes) for storage in ends]))
        return "\n".join([*lines, *self.numbers])


def _line(op: Op, names: Mapping[int, int]) -> str:
    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return f"%{names[arg.value]}"
        return f"[{', '.join(map(text, arg))}]" if isinstance(arg, tuple) else repr(arg)

    given = (*map(text, op.args), *(f"{name}={text(arg)}" for name, arg in op.kwargs))
    return f"{op.target}({', '.join(given)}) {[value is not None for value in op.outputs]}"


def stretches_of(graph: Graph, stays: Container[int]) -> Iterator[Op | FusedStretch]:
    """Yield the operators of a graph in order, with stretches in place of what they compute; operators whose ids
    ``stays`` holds stay as they are."""
    values = graph.values
    maker = {value: op for op in graph.ops for value in op.made()}
    last: dict[int, int] = {}  # value -> position of its last use
    end: dict[int, int] = {}  # storage -> the same of its values
    for position, op in enumerate(graph.ops):
        for value in (*op.inputs(), *op.made()):
            end[values[value].storage] = position
        last.update(dict.fromkeys(op.inputs(), position))
    last.update(dict.fromkeys(graph.outputs, len(graph.ops)))
    end.update((values[value].storage, len(graph.ops)) for value in (*graph.inputs, *graph.outputs))
    run: list[Op] = []
    every: tuple[Op | None, ...] = (*graph.ops, None)
    for position, one in enumerate(every):
        if one is not None and one.id not in stays and _joins(one, values):
            run.append(one)
            continue
        waiting: set[int] = set()
        for part in _apart(run, values):
            touched = {storage for each in part for storage in _touched(each, values)}
            ended = {storage for storage in touched if end.get(storage, -1) < position}
            if one is not None and touched.isdisjoint(_touched(one, values)) and _can_wait(graph, part, ended):
                waiting.update(each.id for each in part)
                continue
            found = None
            working = [each.target.split(".")[1] for each in part if not is_pure_view(values, each)]
            if len(working) >= LEAST or any(name in _ALONE for name in working):
                used = {value for each in part for value in each.made() if last.get(value, -1) >= position}
                found = _stretch(graph, part, maker, used, ended)
            yield from part if found is None else [found]
        run = [each for each in run if each.id in waiting]
        if one is not None:
            yield one


def _touched(op: Op, values: Mapping[int, Value]) -> set[int]:
    """Return the storages that an operator reads, makes or writes."""
    used = {values[value].storage for value in (*op.inputs(), *op.made())}
    return used | {storage for storage, _ in (*op.reads, *op.writes)}


def _can_wait(graph: Graph, ops: Sequence[Op], ended: Container[int]) -> bool:
    """Return True if operators may run later, with others that follow: they free no more bytes than they make.
    ``ended`` are storages that no later operator uses."""
    made = {value for op in ops for value in op.made()}
    older = {graph.values[value].storage for op in ops for value in op.inputs() if value not in made}
    new = {graph.values[value].storage for value in made} - older
    freed = sum(
        graph.storages[each].nbytes for each in older if graph.storages[each].kind == "temporary" and each in ended
    )
    return freed <= sum(graph.storages[each].nbytes for each in new if each not in ended)


def _joins(op: Op, values: Mapping[int, Value]) -> bool:
    """Return True if an operator can be part of a stretch."""
    name, info = op.target.split(".")[1], op_info(op.target)
    if not op.target.startswith("aten.") or op.random or op.body is not None or op.target in IN_TRAINING:
        return False
    if info.kind in _OWN_KERNELS or info.product or info.attention or "conv" in name or name.startswith(_STAYS):
        return False
    if op.scalars() and name.rstrip("_") not in _NUMBERED:
        return False
    if any(isinstance(arg, Const) and arg.kind == "generator" for arg in (*op.args, *(arg for _, arg in op.kwargs))):
        return False
    touched = [values[value] for value in (*op.inputs(), *op.made())]
    if any(each.bits or each.dtype not in NUMBERS for each in touched) or shaped_by_contents(op, values):
        return False
    return bool(op.made()) or bool(op.writes)


def _apart(run: Sequence[Op], values: Mapping[int, Value]) -> list[list[Op]]:
    """Return the operators of a run in groups that share no memory, so that their order is free."""
    group: dict[int, list[Op]] = {}  # storage -> its group
    groups: list[list[Op]] = []
    for op in run:
        touched = _touched(op, values)
        mine: list[Op] = []
        for other in {id(group[each]): group[each] for each in sorted(touched) if each in group}.values():
            mine.extend(other)
            groups = [each for each in groups if each is not other]
            group.update((each, mine) for each, known in group.items() if known is other)
        mine.append(op)
        groups.append(mine)
        group.update(dict.fromkeys(touched, mine))
    place = {id(op): number for number, op in enumerate(run)}
    in_order = [sorted(each, key=lambda op: place[id(op)]) for each in groups]
    return sorted(in_order, key=lambda each: place[id(each[-1])])


def _stretch(
    graph: Graph, ops: list[Op], maker: Mapping[int, Op], used: Container[int], ended: Container[int]
) -> FusedStretch | None:
    """Return the stretch of these operators; ``used`` are values that later operators use, ``ended`` storages that none
    does. None if two of its tensors share memory in a way that the compiler would not see."""
    values, made = graph.values, {value for op in ops for value in op.made()}
    before = list(dict.fromkeys(value for op in ops for value in op.inputs() if value not in made))
    older = {values[value].storage for value in before}
    written = {storage for op in ops for storage, _ in op.writes} & older
    stretch = FusedStretch(ops, numbers=list(dict.fromkeys(name for op in ops for name in op.scalars())))

    def take(value: int) -> None:
        if value in stretch.inputs or value in stretch.again:
            return
        base = _base(value, maker.get(value), values) if values[value].storage in written else None
        if base is None:
            stretch.inputs.append(value)
        else:
            take(base[1])
            stretch.again[value] = base

    for value in before:
        take(value)
    bases: dict[int, tuple[Op | None, int]] = {}

    def give(value: int) -> None:
        if value not in made or value in stretch.outputs or value in bases:
            return
        base = _base(value, maker[value], values)
        if base is None:
            stretch.outputs.append(value)
        else:
            give(base[1])
            bases[value] = base

    for op in ops:
        for value in op.made():
            if value in used:
                give(value)
    for value, (view, base) in bases.items():
        same = Op(0, "aten.alias.default", (Ref(base),), (), (value,), phase=ops[-1].phase, module=ops[-1].module)
        stretch.behind.append(same if view is None else view)
    new = [values[value].storage for value in stretch.outputs]
    if len({*new}) < len(new) or older & {*new} or not _lie_apart([values[value] for value in stretch.inputs], written):
        return None
    lost = {each for each in older if graph.storages[each].kind == "temporary" and each in ended}
    stretch.freed = [value for value in stretch.inputs if values[value].storage in lost]
    shared = Counter(values[value].storage for value in stretch.inputs)
    stretch.given = [
        value
        for value in stretch.freed
        if shared[values[value].storage] == 1 and fills(values[value], graph.storages[values[value].storage])
    ]
    return stretch if stretch.outputs or written - lost else None


def _lie_apart(inputs: Sequence[Value], written: Container[int]) -> bool:
    """Return True if no two of these values share bytes of memory that is written."""
    found = [each for each in inputs if each.storage in written]
    shared = Counter(each.storage for each in found)
    several = [each for each in found if shared[each.storage] > 1]
    if not all(map(is_dense, several)):
        return False
    starts = sorted((each.storage, each.offset * each.nbytes // max(1, each.numel), each.nbytes) for each in several)
    return all(
        storage != other or start + nbytes <= after for (storage, start, nbytes), (other, after, _) in pairwise(starts)
    )


def _base(value: int, op: Op | None, values: Mapping[int, Value]) -> tuple[Op | None, int] | None:
    """Return the value on the same memory from which an operator made this one: with the operator if that is a view,
    with None if it wrote in place. None if it made new memory, or cannot be compiled."""
    if op is None or op.body is not None or op.target in (PART, *MERGES):
        return None
    mine = values[value]
    for base in op.inputs():
        other = values[base]
        if other.storage != mine.storage:
            continue
        if is_pure_view(values, op):
            return (op, base) if _joins(op, values) else None
        if _place(other) == _place(mine):
            return None, base
    return None


def _place(value: Value) -> tuple[Any, ...]:
    return value.shape, value.stride, value.offset, value.dtype
