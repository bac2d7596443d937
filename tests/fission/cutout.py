"""Operators of a step as a graph of their own, which can be run: what they take from elsewhere is drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magis.fission.proof import verify_fission
from magis.graph import ITEM_SIZE, Graph, Op, Value, every_op, verify
from magis.graph.loop_rules import REDUCE
from magis.ops.fake_results import with_bits
from magis.ops.operators import name_of
from magis.runtime.codegen import compile_step
from magis.runtime.double_precision import wide, widened
from magis.runtime.measure import tensor_peak, window_peak
from magis.simulate.simulator import replay
from tests.ops.cutting import POSITIVE, Case, _largest_index
from tests.oracles import workspaces

WIDENED = {**dict.fromkeys(("float32", "bfloat16", "float16"), "float64"), "complex64": "complex128"}


def in_float64(graph: Graph) -> Graph:
    """The same step in double precision, where sums do not depend on their order in more than the last digits."""
    growth = {
        value.storage: ITEM_SIZE[WIDENED[value.dtype]] // ITEM_SIZE[value.dtype]
        for value in graph.values.values()
        if value.dtype in WIDENED
    }
    storages = {key: replace(s, nbytes=s.nbytes * growth.get(key, 1)) for key, s in graph.storages.items()}
    values = {key: replace(value, dtype=WIDENED.get(value.dtype, value.dtype)) for key, value in graph.values.items()}
    return replace(graph, storages=storages, values=values, ops=tuple(widened(op) for op in graph.ops))


def stand_alone(graph: Graph, positions: Collection[int], shown: Collection[int]) -> Graph:
    """The operators at these positions; ``shown`` are the values to return.

    Values from elsewhere become inputs, their storages those of a batch, whose contents are at version 0.
    """
    ops = [graph.ops[position] for position in sorted(positions)]
    made = {value for op in ops for value in op.made()}
    inputs = list(dict.fromkeys(value for op in ops for value in op.inputs() if value not in made))
    used = [*inputs, *dict.fromkeys(value for op in ops for value in op.made())]
    values = {value: graph.values[value] for value in used}
    outside = {values[value].storage for value in inputs}
    storages = {
        key: replace(graph.storages[key], kind="batch" if key in outside else graph.storages[key].kind)
        for key in dict.fromkeys(value.storage for value in values.values())
    }
    first = _first_versions(ops)
    based = tuple(
        replace(op, reads=_rebased(op.reads, first), writes=_rebased(op.writes, first), id=number)
        for number, op in enumerate(ops)
    )
    # By id: a loop gives its results in another order than the operators that it stands for.
    return Graph(storages, values, based, tuple(inputs), tuple(sorted(set(used) & set(shown))))


def _first_versions(ops: Sequence[Op]) -> dict[int, int]:
    """The version of each storage that the operators meet first."""
    first: dict[int, int] = {}
    for op in ops:
        for storage, version in op.reads:
            first.setdefault(storage, version)
        for storage, version in op.writes:
            first.setdefault(storage, version - 1)
    return first


def _rebased(versions: tuple[tuple[int, int], ...], first: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((storage, version - first[storage]) for storage, version in versions)


def leaving(graph: Graph, positions: Collection[int]) -> set[int]:
    """Values made at these positions that others take, or the caller."""
    made = {value for position in positions for value in graph.ops[position].made()}
    taken = {value for at, op in enumerate(graph.ops) if at not in positions for value in op.inputs()}
    return made & (taken | set(graph.outputs))


# --- inputs -----------------------------------------------------------------------------------------------------------


def draw(graph: Graph, seed: int) -> dict[int, Tensor]:
    """The memory of every input's storage, by storage: what the operators accept there."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[int, Tensor] = {}
    for number in graph.inputs:
        value = graph.values[number]
        if value.storage not in found:
            dtype: torch.dtype = getattr(torch, value.dtype)
            count = graph.storages[value.storage].nbytes // ITEM_SIZE[value.dtype]
            found[value.storage] = _contents(graph, number, count, generator).to(dtype)
    return found


def _contents(graph: Graph, number: int, count: int, generator: torch.Generator) -> Tensor:
    dtype = graph.values[number].dtype
    users = list(_users(graph, number))
    if dtype == "bool":
        return torch.rand(count, generator=generator) < 0.5
    if dtype.startswith("complex"):
        return torch.randn(count, generator=generator, dtype=torch.complex128)
    if not dtype.startswith("float"):
        bound = min((_largest_index(Case(op, graph.values)) for op in users), default=2)
        drawn = torch.randint(bound, (count,), generator=generator)
        ignored = any("nll_loss" in op.target for op in users)
        return torch.where(torch.rand(count, generator=generator) < 0.25, -100, drawn) if ignored else drawn
    drawn = torch.rand(count, generator=generator, dtype=torch.float64)
    return drawn / 2 + 0.25 if any(name_of(op.target) in POSITIVE for op in users) else 2 * drawn - 1


def _users(graph: Graph, number: int) -> Iterator[Op]:
    """Operators that take a value, or what another one makes of the same whole numbers."""
    shown = {number}
    for op in graph.ops:
        if shown & set(op.inputs()):
            yield op
            shown.update(v for v in op.made() if graph.values[v].dtype == graph.values[number].dtype == "int64")


def tensors_of(graph: Graph, memory: Mapping[int, Tensor]) -> list[Tensor]:
    """The inputs of the graph on that memory."""
    return [_window(memory[value.storage], value) for value in (graph.values[number] for number in graph.inputs)]


def _window(memory: Tensor, value: Value) -> Tensor:
    """What a value shows of the memory of its storage."""
    shown = memory.view(getattr(torch, value.dtype)).as_strided(value.shape, value.stride, value.offset)
    return with_bits(shown, value.bits)


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a run left: its results, and the memory of its inputs."""

    results: dict[int, Tensor]
    memory: dict[int, Tensor]


def outcome(graph: Graph, memory: Mapping[int, Tensor]) -> Outcome:
    """Run the graph on a copy of the memory."""
    copied = {storage: tensor.clone() for storage, tensor in memory.items()}
    results = compile_step(graph)(tensors_of(graph, copied), {})
    return Outcome(dict(zip(graph.outputs, results, strict=True)), copied)


def differences(expected: Outcome, found: Outcome, graph: Graph) -> list[str]:
    """Which results, layouts or memories of inputs are not the same but for the last digits."""
    lines = []
    for key, tensor in expected.results.items():
        made, looks = found.results[key], graph.values[key]
        if (made.shape, made.stride(), made.dtype) != (looks.shape, looks.stride, tensor.dtype):
            lines.append(f"value {key}: {tuple(made.shape)} {made.stride()} instead of {looks}")
        elif not close(made, tensor):
            lines.append(f"value {key}: off by {(wide(made) - wide(tensor)).abs().max().item():.3g}")
    lines += [
        f"storage {key}: other contents"
        for key in expected.memory
        if not close(found.memory[key], expected.memory[key])
    ]
    return lines


def close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for the order of sums."""
    if not expected.is_floating_point() and not expected.is_complex():
        return torch.equal(found, expected)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-11 * scale, equal_nan=True)


def workspace_of(graph: Graph) -> Callable[[Op, Mapping[int, Value]], int]:
    """Scratch of each operator, measured in isolation; of reductions, too, where they take any."""
    known = workspaces().of(graph)

    def workspace(op: Op, values: Mapping[int, Value]) -> int:
        if op.target == REDUCE and op.args[-1] == "mean":
            share = Op(0, "aten.mul_.Scalar", (op.args[0], 0.5), (), ())
            return workspaces().of(Graph({}, dict(values), (share,), (), ()))(share, values)
        return known(op, values)

    return workspace


def simulated(graph: Graph) -> tuple[int, int]:
    """Peak and tensor bytes by the exact simulator."""
    profile = replay(graph, workspace_of(graph))
    return profile.peak_bytes, profile.tensor_bytes


def measured(graph: Graph, memory: Mapping[int, Tensor]) -> tuple[int, int]:
    """The same by the allocator's count."""
    step, inputs, persistent = compile_step(graph), tensors_of(graph, memory), graph.persistent_bytes()
    peak = window_peak(lambda: step(inputs, {})).peak_bytes
    return peak + persistent, tensor_peak(lambda: step(inputs, {})) + persistent


def loops(graph: Graph) -> list[Op]:
    return [op for op, _ in every_op(graph) if op.body is not None]


def check_same(whole: Graph, looped: Graph, seed: int = 0) -> None:
    """The loops are sound and proven; they compute the same from the same inputs, and take the simulated bytes."""
    verify(looped)
    verify_fission(looped, whole)
    memory = draw(whole, seed)
    assert differences(outcome(whole, memory), outcome(looped, memory), whole) == []
    assert simulated(looped) == measured(looped, memory)
