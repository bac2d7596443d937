"""Every operator that torch lists, on torch's own samples, forward and backward: captured, counted and cut."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from magis.errors import MagisError
from magis.graph import Graph, Op, Value, verify
from magis.ops.operators import name_of
from magis.ops.splits import splits, why_opaque
from magis.simulate.simulator import replay
from tests.golden.golden import SWITCH
from tests.nets import Built
from tests.ops.cutting import distinct, malformed, problems
from tests.ops.samples import operators, samples, step_of
from tests.oracles import captured, differences, eager_step, graph_step, observed, workspaces

SHARES = 48
"""Operators are tested in so many groups, of which the default run takes some (`tests/sampled.py`)."""
GOLDEN = Path(__file__).parents[1] / "golden" / "splits_of_operators.txt"
"""A line for each operator: how many splits its calls have, forward and backward."""


OPEN_CONTENTS = re.compile("(new_)?empty")
"""Operators that leave the contents of their results open."""

OTHER_WHEN_WATCHED = {
    "allclose", "clamp", "linalg.cholesky", "linalg.cholesky_ex", "linalg.householder_product",
    "linalg.matrix_rank", "linalg.matrix_rank.hermitian", "linalg.pinv", "linalg.pinv.hermitian",
    "linalg.pinv.singular", "masked_fill", "matrix_exp", "max.reduction_no_dim", "median", "min.reduction_no_dim",
    "nanmedian", "native_group_norm", "nn.functional.binary_cross_entropy", "ormqr", "pca_lowrank", "pinverse",
    "special.i1e", "svd_lowrank", "take", "trace",
}  # fmt: skip
"""Operators that run others inside, in place or with other temporaries, as long as no mode watches: eager's own peak is
another one, its tensors are as simulated."""

SCRATCH_BY_CONTENTS = {"matrix_exp"}
"""Operators whose kernels take as much scratch as the contents ask for: made-up contents tell nothing."""


def name(operator: Any) -> str:
    return f"{operator.name}.{operator.variant_test_name}".rstrip(".")


@pytest.mark.parametrize("share", range(SHARES))
def test_an_operator_is_eagers_in_numbers_and_bytes_and_is_the_sum_of_its_parts(share: int) -> None:
    found, known = list[str](), dict[str, str]()
    for operator in operators()[share::SHARES]:
        cut = Counter[str]()
        for number, sample in enumerate(samples(operator, 2)):
            net = step_of(operator, sample)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += [f"{name(operator)}, sample {number}: {line}" for line in judged(operator, net, cut)]
        known[name(operator)] = " ".join(f"{target} {count}" for target, count in sorted(cut.items()))
    assert found == []
    assert known == stored(known)


def judged(operator: Any, net: Built, cut: Counter[str]) -> Iterator[str]:
    """What is wrong with a step of one operator; counts the splits of its calls."""
    try:
        step = captured(net)
    except MagisError as refusal:
        if "\n" in str(refusal):
            yield f"refused in several lines: {refusal}"
        return
    verify(step.graph)
    persistent = step.graph.persistent_bytes()
    expected, *eager_bytes = observed(eager_step(net), persistent)
    numbers, *bytes_of_graph = observed(graph_step(step.graph, net), persistent)
    if not OPEN_CONTENTS.match(operator.name):
        yield from differences(expected, numbers)
    measured, unknown = workspaces().of(step.graph), list[str]()

    def workspace(op: Op, values: Mapping[int, Value]) -> int:
        try:
            return measured(op, values)
        except KeyError:  # its kernel takes no made-up numbers
            unknown.append(op.target)
            return 0

    for what, counted, profile in (
        ("eager", eager_bytes, replay(step.graph, workspace, deaths=step.deaths, numbers=step.numbers)),
        ("graph", bytes_of_graph, replay(step.graph, workspace)),
    ):
        leaves_peak_open = bool(unknown) or operator.name in SCRATCH_BY_CONTENTS
        leaves_peak_open |= what == "eager" and name(operator) in OTHER_WHEN_WATCHED
        simulated = [counted[0] if leaves_peak_open else profile.peak_bytes, profile.tensor_bytes]
        if counted != simulated:
            yield f"bytes of {what}: simulated {simulated}, measured {counted}"
    yield from cut_apart(step.graph, cut)


def cut_apart(graph: Graph, cut: Counter[str]) -> Iterator[str]:
    for case in distinct([graph]).values():
        every = splits(case.op, case.values)
        if bool(why_opaque(case.op, case.values)) == bool(every):
            yield f"{case.op.target}: a reason is given exactly where nothing can be cut"
        yield from (f"{case.op.target} {split}: {text}" for split in every if (text := malformed(case, split)))
        yield from problems(case, largest=8)
        if every:
            cut[name_of(case.op.target)] += len(every)


def stored(now: dict[str, str]) -> dict[str, str]:
    """What is written of these operators; under the switch, after writing it."""
    lines = dict(line.split(":", 1) for line in GOLDEN.read_text(encoding="utf-8").splitlines())
    if os.environ.get(SWITCH):
        lines |= {key: f" {text}".rstrip() for key, text in now.items()}
        GOLDEN.write_text("".join(f"{key}:{lines[key]}\n" for key in sorted(lines)), encoding="utf-8")
    return {key: lines.get(key, "").strip() for key in now}
