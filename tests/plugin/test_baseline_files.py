"""Baseline files: names, round trips, and what survives an update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import BaselineError
from magis.results import Case
from pytest_magis.baseline_files import baseline_path, parse, read_baseline, render, write_baseline
from pytest_magis.baselines import CaseBaseline, Configuration, Measured, ModelBaseline
from pytest_magis.findings import accept_all, accept_case

NAMES = st.text(min_size=1, max_size=40)
COUNTS = st.integers(min_value=0, max_value=2**63 - 1)
RATIOS = st.none() | st.floats(min_value=0.001, max_value=1000)


@st.composite
def baselines(draw: st.DrawFn) -> ModelBaseline:
    measured = st.builds(Measured, COUNTS, COUNTS, COUNTS, st.none() | COUNTS, RATIOS, RATIOS, RATIOS)
    tables = draw(st.dictionaries(NAMES, st.dictionaries(NAMES, COUNTS, max_size=3), max_size=3))
    cases = st.builds(
        CaseBaseline,
        feasible=st.booleans(),
        graph=NAMES,
        optimized_tensor_bytes=COUNTS,
        original_tensor_bytes=COUNTS,
        states_evaluated=COUNTS,
        workspaces=st.sampled_from([None, *tables]),
        measured=st.dictionaries(NAMES, measured, max_size=2),
    )
    configurations = st.builds(Configuration, st.dictionaries(NAMES, cases, max_size=3), st.just(tables))
    return ModelBaseline(draw(NAMES), draw(NAMES), draw(st.dictionaries(NAMES, configurations, max_size=2)))


@given(baselines())
def test_what_is_written_is_read_back(baseline):
    assert parse(render(baseline), Path("x.json")) == baseline


def refusal(text: str) -> str:
    """Why `text` is no baseline; empty if it is one. Any other error than a refusal is a defect."""
    try:
        parse(text, Path("x.json"))
    except BaselineError as error:
        return str(error)
    return ""


@given(st.text(max_size=300))
def test_no_text_does_anything_but_parse_or_be_refused(text):
    assert "\n" not in refusal(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(baselines(), JSON, st.randoms(use_true_random=False))
def test_no_replaced_value_does_anything_but_parse_or_be_refused(baseline, value, random):
    data = json.loads(render(baseline))
    inner = data
    while True:
        key = random.choice(sorted(inner))
        if not isinstance(inner[key], dict) or not inner[key] or random.random() < 0.2:
            break
        inner = inner[key]
    inner[key] = value
    message = refusal(json.dumps(data))
    assert "\n" not in message
    assert len(message) < 1000


@given(NAMES, NAMES)
def test_every_name_has_a_file_of_its_own_inside_the_directory(first, second):
    paths = [baseline_path(Path("/base"), "cpu", name) for name in (first, second)]
    assert (paths[0] == paths[1]) == (first == second)
    assert all(path.parent == Path("/base/cpu") and path.resolve() == path for path in paths)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", "bert.json"),
        ("seed-resnet50", "seed-resnet50.json"),
        ("pkg.mod:make", "pkg.mod%3Amake.json"),
        ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd.json"),
        ("..", "%2E..json"),
        ("ä", "%C3%A4.json"),
        ("a%3Ab", "a%253Ab.json"),
    ],
)
def test_names_of_files(name, expected):
    assert baseline_path(Path("base"), "sim:rtx3090", name) == Path("base/sim-rtx3090") / expected


def test_long_names_fit_a_file_system(tmp_path):
    names = [f"{'module.' * 60}:{letter}" for letter in "ab"]
    for name in names:
        write_baseline(baseline_path(tmp_path, "cpu", name), ModelBaseline(name, "cpu", {}))
    assert len(list((tmp_path / "cpu").iterdir())) == 2
    assert [read_baseline(baseline_path(tmp_path, "cpu", name), name, "cpu") for name in names] == [
        ModelBaseline(name, "cpu", {}) for name in names
    ]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "cpu").write_text("in the way")
    with pytest.raises(BaselineError, match=r"cannot make directory .*cpu: File exists"):
        write_baseline(tmp_path / "cpu" / "bert.json", ModelBaseline("bert", "cpu", {}))


GIVEN = (
    ("--magis-models", "all"),
    ("--magis-memory-ratios", "0.8,0.6"),
    ("--magis-device", "sim:rtx3090"),
    ("--magis-seconds", "5"),
    ("--magis-csv", "out.csv"),
    ("--magis-baselines", "my dir"),
)


def test_commands_repeat_flags_without_a_value():
    given = (("--magis-strict", "true"), ("--magis-device", "cpu"))
    words = "--magis-strict --magis-device=cpu --magis-update=new"
    assert accept_all(given, ("new",)) == f"pytest {words}"
    case = Case("bert", "eager", "cpu", "small")
    assert accept_case(given, "", case, ("new",), "test_a.py::test_net") == f"pytest test_a.py::test_net {words}"


def test_commands_repeat_what_matters_and_quote_it():
    case = Case("bert", "magis", "sim:rtx3090", "paper", memory_ratio=0.8)
    assert accept_case(GIVEN, "bert", case, ("new",)) == (
        "pytest --magis-models=bert --magis-strategies=magis --magis-memory-ratios=0.8 --magis-device=sim:rtx3090 "
        "'--magis-baselines=my dir' --magis-update=new"
    )
    assert accept_all(GIVEN, ("better", "worse")) == (
        "pytest --magis-models=all --magis-memory-ratios=0.8,0.6 --magis-device=sim:rtx3090 "
        "'--magis-baselines=my dir' --magis-update=better,worse"
    )
