"""What is found out about a model before its first case runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magis.cases.check import check_case
from magis.errors import CaptureError, MagisError, UsageError
from magis.planner.bench import Bench
from magis.planner.subject import Subject
from magis.results import Case

NETS = "tests.plugin.own_nets"
BRANCHES = r"the step depends on the data of a tensor \(.*\) in module '\(root\)' at own_nets\.py:\d+; replace"
ADDMM = r"mixed data types: aten\.addmm\.default in module '\(root\)' is given float32 and int64; the step must run"
MM = r"mixed data types: aten\.mm\.default in module '\(root\)' is given float32 and float64; the step must run"
DEVICES = r"FakeTensorDeviceMismatchError in module '\(root\)' at own_nets\.py:\d+: .* cpu and meta"
NORM = r"RuntimeError at own_nets\.py:\d+ in eager mode: mixed dtype \(CPU\).*; the step must run eagerly"
EVERYWHERE = ("cpu", "sim:rtx3090")


def checked(wanted: Case, bench: Bench | None = None) -> Subject:
    bench = bench or Bench()
    check_case(wanted, cache=bench)
    return bench.subject(wanted)


def case(model: str, device: str = "cpu", strategy: str = "eager", **more: object) -> Case:
    return Case(model if ":" in model else f"{NETS}:{model}", strategy, device, "small", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("branches", CaptureError, BRANCHES),
        ("on_meta", CaptureError, r"weight is on device meta; build it on the CPU, not on 'meta'"),
        ("on_two_devices", CaptureError, r"1\.weight is on device meta; build it"),
        ("across_devices", CaptureError, DEVICES),
        (
            "two_types",
            CaptureError,
            r"mixed data types: aten\.addmm\.default in module '1' is given float32 and float64",
        ),
        (
            "other_input",
            CaptureError,
            r"mixed data types: aten\.addmm\.default in module '\(root\)' is given float32 and ",
        ),
        ("whole_input", CaptureError, ADDMM),
        ("mixed_product", CaptureError, MM),
        ("mixed_conv", CaptureError, r"expected scalar type Double but found Float"),
        (
            "without_parameters",
            CaptureError,
            r"there is nothing to train: no parameter requires a gradient; unfreeze one",
        ),
        ("frozen", CaptureError, r"there is nothing to train: no parameter requires a gradient; unfreeze one"),
        ("raises", UsageError, r"own_nets:raises: the factory failed: OSError: no such checkpoint anywhere"),
        ("returns_nothing", UsageError, r"own_nets:returns_nothing: the factory returned a NoneType; return"),
        ("nosuch", UsageError, r"own_nets has no attribute 'nosuch'"),
        (f"{NETS}.nosuch:net", UsageError, r"cannot import tests\.plugin\.own_nets\.nosuch: ModuleNotFoundError"),
    ],
)
def test_each_kind_of_mistake_is_one_line(device: str, model: str, error: type[MagisError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        check_case(case(model, device))
    assert "\n" not in str(caught.value)


def test_what_only_the_real_kernels_refuse_is_found_where_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError, match=NORM):
        check_case(case("mixed_norm"))
    check_case(case("mixed_norm", "sim:rtx3090"))
    monkeypatch.setattr("magis.planner.subject.free_device_memory", lambda _device: 1000)
    check_case(case("mixed_norm"))


@pytest.mark.parametrize("device", EVERYWHERE)
def test_a_model_keeps_the_data_types_that_it_was_built_with(device: str) -> None:
    for preset in ("small", "paper"):
        for name in ("bfloat16", "float16", "float64"):
            subject = checked(replace(case(f"in_{name}", device), preset=preset))
            assert subject.source.dtype == name
            assert {value.dtype for value in subject.captured.graph.values.values()} == {name}
            assert {p.dtype for p in subject.workload.module.parameters()} == {getattr(torch, name)}


@pytest.mark.parametrize("device", EVERYWHERE)
def test_a_type_that_is_asked_for_converts_everything(device: str) -> None:
    bench = Bench()
    for name, asked in (("in_bfloat16", "float32"), ("two_types", "bfloat16"), ("other_input", "float32")):
        subject = checked(case(name, device, dtype=asked), bench)
        assert subject.source.dtype == asked
        assert {value.dtype for value in subject.captured.graph.values.values()} == {asked}
    assert checked(case("in_bfloat16", device), bench).source.dtype == "bfloat16"


def test_captures_are_kept_for_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    check_case(case("sound"), cache=bench)
    captured = bench.subject(case("sound", strategy="magis", memory_ratio=0.8)).captured
    monkeypatch.setattr(Subject, "_captured", None)  # a further capture would fail
    check_case(case("sound"), cache=bench)
    assert bench.subject(case("sound")).captured is captured
