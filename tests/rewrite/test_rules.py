"""Every rule: its golden file, its numbers on drawn sizes, the way back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magis.extensions.paper.interim_rules import RULES, rule
from magis.graph import Graph, verify
from magis.ops.call import call
from magis.rewrite.rules.rule_table import Rule, apply, matches
from tests.golden.golden import before_and_after, check_golden
from tests.nets import Built
from tests.oracles import graph_step, same
from tests.rewrite.alike import canonical
from tests.rewrite.patterns import SIZES, graph_of, program
from tests.strategies import examples

every_rule = pytest.mark.parametrize("each", RULES, ids=lambda each: each.name)


def test_every_rule_has_an_example_and_a_name_of_its_own() -> None:
    assert [each.name for each in RULES] == list(dict.fromkeys(each.name for each in RULES))
    assert SIZES.keys() == {each.name for each in RULES}
    for each in RULES:
        for name in each.inverse:
            rule(name)


@every_rule
def test_golden(each: Rule) -> None:
    before = graph_of(program(each, 0))
    after = apply(before, next(matches(each, before)))
    verify(after)
    check_golden(f"rules/{each.name}.txt", f"# {each.text}\n{before_and_after(before, after)}")


@every_rule
@given(seed=st.integers(1, 2**30), single=st.booleans())
@examples(6)
def test_numbers(each: Rule, seed: int, single: bool) -> None:
    """Bit-identical where the rule says so; else as close as float64 gets, and float32 by its own measure."""
    built = program(each, seed, dtype=torch.float32 if single else torch.float64)
    before = graph_of(built)
    found = list(matches(each, before))
    assert found, "the program of the left side does not match"
    expected = results(before, built)
    for match in found:
        after = apply(before, match)
        verify(after)
        check_looks(after, built)
        for ours, theirs in zip(results(after, built), expected, strict=True):
            if each.exact:
                assert same(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-4 if single else 1e-12, atol=1e-5 if single else 1e-12)


def results(graph: Graph, built: Built) -> tuple[torch.Tensor, ...]:
    """What the generated code returns."""
    step = graph_step(graph, built)
    step.prepare()
    step.run()
    return step.results()


def check_looks(graph: Graph, built: Built) -> None:
    """Every tensor has the shape, stride, offset, type and memory that the graph says."""
    tensors = dict(zip(graph.inputs, built.inputs, strict=True))
    where: dict[int, int] = {}
    for op in graph.ops:
        for value, tensor in zip(op.outputs, call(op, tensors, {}), strict=True):
            assert value is not None
            assert tensor is not None
            tensors[value] = tensor
    for value, tensor in tensors.items():
        looks = graph.values[value]
        seen = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), str(tensor.dtype))
        assert seen == (looks.shape, looks.stride, looks.offset, f"torch.{looks.dtype}"), graph.values[value]
        memory = tensor.untyped_storage()
        assert memory.nbytes() == graph.storages[looks.storage].nbytes
        assert where.setdefault(looks.storage, memory.data_ptr()) == memory.data_ptr()


@pytest.mark.parametrize("each", [each for each in RULES if each.inverse], ids=lambda each: each.name)
@given(seed=st.integers(0, 2**30))
@examples(3)
def test_inverse(each: Rule, seed: int) -> None:
    before = graph_of(program(each, seed))
    after = apply(before, next(matches(each, before)))
    assert canonical(after) != canonical(before) or each.name.endswith("-swap")
    assert canonical(before) in {canonical(back) for back in ways(after, each.inverse)}


def ways(graph: Graph, names: tuple[str, ...]) -> Iterator[Graph]:
    """Everything that the rules lead to, applied one after the other."""
    if not names:
        yield graph
        return
    for match in matches(rule(names[0]), graph):
        yield from ways(apply(graph, match), names[1:])
