"""Whose the bytes at the peak are, against a count by brute force; and the short tables that say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.graph import Graph, Op, digest
from magis.results import ModuleBytes, collapsed, is_below
from magis.simulate.peak_breakdown import live_storages, module_table, peak_of
from magis.simulate.simulator import replay
from magis.simulate.timeline import PLACES, held_by_kind
from tests.graph.loop_graphs import sound
from tests.nets import NETS
from tests.oracles import captured, lives, no_scratch

KINDS = {"forward": "activation", "backward": "gradient", "update": "update"}


def counted(graph: Graph, deaths: Mapping[int, int], at: int) -> Counter[tuple[str, str]]:
    """Bytes by kind and module during operator ``at``: every storage, and whoever wrote it last, read backwards."""
    found: Counter[tuple[str, str]] = Counter()
    names = {graph.values[value].storage: graph.values[value].name for value in reversed(graph.inputs)}
    for storage in graph.storages.values():
        if storage.persistent:
            path = names[storage.id].split(":")[-1] if storage.kind in ("parameter", "buffer", "state") else ""
            found[storage.kind, path.rpartition(".")[0]] += storage.nbytes
        elif storage.kind == "temporary" and at in lives(graph, deaths, storage.id):
            for op in reversed(graph.ops[: at + 1]):
                taken = {graph.values[value].storage for value in op.inputs()}
                made = {graph.values[value].storage for value in op.made()}
                view = made and not op.writes and not op.random and made <= taken
                if storage.id in made and not view:
                    found[KINDS[op.phase], op.module] += storage.nbytes
                    break
    return Counter({key: nbytes for key, nbytes in found.items() if nbytes})


@pytest.mark.parametrize("name", ["encoder-layer", "tied", "inplace-dropout", "batch-norm", "conv-inplace"])
def test_every_byte_at_the_peak_has_the_owner_that_a_count_finds(name: str) -> None:
    step = captured(NETS[name].build())
    profile = replay(step.graph, no_scratch, deaths=step.deaths)
    at = profile.tensors.index(profile.tensor_bytes)
    peak = peak_of(step.graph, no_scratch, profile, deaths=step.deaths)
    assert {(row.kind, row.module): row.nbytes for row in peak.held} == counted(step.graph, step.deaths, at)
    assert peak.tensor_bytes == profile.tensor_bytes
    assert (peak.op, peak.module, peak.phase) == (
        step.graph.ops[at].target,
        step.graph.ops[at].module,
        step.graph.ops[at].phase,
    )
    held = held_by_kind(step.graph, deaths=step.deaths)
    for position in range(0, len(step.graph.ops), 7):
        by_kind = [0] * len(held[position])
        for (kind, _), nbytes in counted(step.graph, step.deaths, position).items():
            by_kind[PLACES[kind]] += nbytes
        assert held[position] == tuple(by_kind)
        rows = module_table(live_storages(step.graph, position, no_scratch, deaths=step.deaths))
        assert sum(row.nbytes for row in rows) == profile.tensors[position]


def test_within_a_loop_the_tensors_of_one_part_count_too() -> None:
    graph = replace(sound(), ops=tuple(_in_module(op, "outside") for op in sound().ops))
    profile = replay(graph, no_scratch)
    peak = peak_of(graph, no_scratch, profile)
    assert peak.tensor_bytes == profile.tensor_bytes
    assert {row.module for row in peak.held if row.kind == "activation"} >= {"outside.inside"}


def _in_module(op: Op, module: str) -> Op:
    if op.body is None:
        return replace(op, module=module) if not op.target.startswith("magis.") else op
    inner = op.body.graph
    body = replace(op.body, graph=replace(inner, ops=tuple(_in_module(each, f"{module}.inside") for each in inner.ops)))
    return replace(op, body=body)


def test_lines_are_those_of_the_call_and_no_part_of_the_graph() -> None:
    graph = captured(NETS["tied"].build()).graph
    text = (Path(__file__).parent.parent / "nets.py").read_text(encoding="utf-8").splitlines()
    found = {op.target: op.line.rpartition(":") for op in graph.ops if op.phase == "forward"}
    assert {found["aten.embedding.default"][0], found["aten.mm.default"][0]} == {"tests/nets.py"}
    assert "self.embedding(" in text[int(found["aten.embedding.default"][2]) - 1]
    (backward,) = (op for op in graph.ops if op.target == "aten.embedding_dense_backward.default")
    assert (
        backward.line.rpartition(":") == found["aten.embedding.default"]
    )  # a backward call stands where its forward does
    assert found["aten._log_softmax.default"][2] == ""  # called by a loss of torch's own: no line of theirs
    bare = replace(graph, ops=tuple(replace(op, line="") for op in graph.ops))
    assert digest(bare) == digest(graph)
    assert bare == graph


# --- tables -----------------------------------------------------------------------------------------------------------

PATHS = st.lists(st.sampled_from("abc"), max_size=4).map(".".join)
ROWS = st.lists(
    st.builds(ModuleBytes, st.sampled_from(["activation", "state"]), PATHS, st.integers(1, 99), st.integers(1, 3)),
    max_size=40,
    unique_by=lambda row: (row.kind, row.module),
)


@given(ROWS, st.integers(1, 40))
def test_no_byte_is_lost_and_none_told_twice(rows: list[ModuleBytes], most: int) -> None:
    short = collapsed(rows, most)
    for kind in ("activation", "state"):
        for part in ("nbytes", "count"):
            assert sum(getattr(row, part) for row in short if row.kind == kind) == sum(
                getattr(row, part) for row in rows if row.kind == kind
            )
    assert len(short) <= max(most, 4)
    assert [row.nbytes for row in short] == sorted((row.nbytes for row in short), reverse=True)
    if len(rows) <= most:
        assert set(short) == set(rows)
    for row in short:  # a row for several modules stands for all of them
        if row.module.endswith("*"):
            path = row.module.removesuffix("*").rstrip(".")
            members = [each for each in rows if each.kind == row.kind and is_below(each.module, path)]
            assert (row.nbytes, row.count) == (sum(m.nbytes for m in members), sum(m.count for m in members))
            assert len(members) > 1
