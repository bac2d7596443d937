"""From a name or a factory to a model that can be built."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import magis.models
from magis.errors import CaptureError, UsageError
from magis.extensions.models.network_names import GATE_NAMES
from magis.models import UnknownModelError, Workload, all_names, from_factory, get
from magis.models.custom import as_workload

HERE = "tests.models.factories"


def test_specs() -> None:
    for name in all_names():
        spec = get(name)
        assert spec.name == name
        assert spec.variant == ("seed" if name.startswith("seed-") else "real")
    half = {name for name in all_names() if get(name).paper_dtype == "bfloat16"}
    assert half == {"gpt_neo", "btlm", "seed-gpt_neo", "seed-btlm"}
    assert {get(name).paper_dtype for name in set(all_names()) - half} == {"float32"}


def test_unknown_names_and_presets() -> None:
    with pytest.raises(UnknownModelError, match="did you mean resnet50"):
        get("resnet-50")
    with pytest.raises(UnknownModelError):
        get("all")
    with pytest.raises(UsageError, match="unknown preset 'large'; choose paper or small"):
        get("bert").build("large", 0)


def test_the_package_exports_its_types_lazily() -> None:
    assert magis.models.Workload is Workload
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = magis.models.Nothing


def test_the_seed_decides_weights_and_batch_and_leaves_no_trace() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, same, other = (get("vit").build("small", seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    for a, b, c in zip(one.module.parameters(), same.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.std() == 0 or (a == a.flatten()[0]).all() or not torch.equal(a, c)
    assert torch.equal(one.inputs[0], same.inputs[0])
    assert not torch.equal(one.inputs[0], other.inputs[0])
    assert torch.equal(one.targets[0], same.targets[0])
    assert not torch.equal(one.targets[0], other.targets[0])


@pytest.mark.parametrize("name", GATE_NAMES)
def test_optimizers(name: str) -> None:
    assert get(name).build("small", 0).optimizer.kind == "adamw"
    seed = get(f"seed-{name}").build("small", 0).optimizer
    assert (seed.kind, seed.weight_decay, seed.momentum) == ("sgd", 0, 0)


@pytest.mark.parametrize("factory", ["as_tuple", "Maker.make"])
def test_a_tuple_becomes_a_workload(factory: str) -> None:
    path = f"{HERE}:{factory}"
    made = get(path).build("paper", 0)
    assert made.name == path
    assert made.module.training
    assert [tuple(tensor.shape) for tensor in (*made.inputs, *made.targets)] == [(3, 4), (3, 2)]
    assert (made.optimizer.kind, made.optimizer.lr) == ("sgd", 1e-3)
    assert made.loss_fn(made.module(*made.inputs), *made.targets).shape == ()


def test_a_factory_is_called_with_the_seed_set() -> None:
    one, same, other = (from_factory(f"{HERE}:as_tuple").build("small", seed) for seed in (1, 1, 2))
    assert torch.equal(one.inputs[0], same.inputs[0])
    assert not torch.equal(one.inputs[0], other.inputs[0])


def test_a_workload_keeps_everything_but_its_name() -> None:
    made = get(f"{HERE}:as_workload").build("small", 0)
    assert (made.name, made.blocks) == (f"{HERE}:as_workload", ("",))
    assert (made.optimizer.kind, made.optimizer.lr) == ("adam", 0.5)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such_module:make", "no.such_module:make: cannot import no.such_module: ModuleNotFoundError"),
        (
            "no_nets.py:make",
            "cannot import no_nets.py: ModuleNotFoundError: No module named 'no_nets'; did you mean no_nets:",
        ),
        (f"{HERE}:missing", f"{HERE} has no attribute 'missing'"),
        (f"{HERE}:as_tupel", f"{HERE} has no attribute 'as_tupel'; did you mean as_tuple"),
        (f"{HERE}:Maker.missing", f"{HERE} has no attribute 'Maker.missing'"),
        (f"{HERE}:number", "number is a int, not a callable"),
        ("not a path:make", "not a model factory"),
    ],
)
def test_factories_that_cannot_be_found(path: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        get(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_tuple", "the factory returned a int; return a magis.api.Workload, (module, inputs, targets, loss_fn), "),
        ("short", "a batch of a Tensor; pass (inputs, targets)"),
        ("no_module", "the module is a str, not an nn.Module"),
        ("no_tensors", "inputs hold a object, which is no tensor, number, text or container"),
        ("no_loss", "the loss function is a str, not callable"),
        ("class_of_module", "the factory returned the class Linear; call it: Linear()"),
        ("compiled", "the model is compiled by torch.compile (module '0'); give it uncompiled"),
        ("takes_a_width", "the factory needs arguments: missing a required argument: 'width'; give them defaults"),
        ("class_of_loss", "the factory returned the class MSELoss; call it: MSELoss()"),
        ("class_of_optimizer", "the factory returned the class RMSprop; call it: RMSprop(module.parameters())"),
        ("fails", "the factory failed: ValueError: two lines"),
        ("leaves", "the factory called exit (SystemExit: 2)"),
        ("leaves_without_a_word", "the factory called exit (SystemExit)"),
    ],
)
def test_factories_that_return_something_else(factory: str, message: str) -> None:
    spec = get(f"{HERE}:{factory}")
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        spec.build("small", 0)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{HERE}:{factory}: ")


def test_an_error_on_purpose_passes_unchanged() -> None:
    with pytest.raises(CaptureError, match=r"^as said$"):
        get(f"{HERE}:fails_on_purpose").build("small", 0)
    with pytest.raises(UsageError, match="unknown optimizer 'lion'"):
        get(f"{HERE}:bad_optimizer").build("small", 0)


@pytest.mark.parametrize(
    ("name", "program", "message"),
    [
        (
            "broken_networks",
            "raise RuntimeError('no data set here')",
            "cannot import broken_networks: RuntimeError: no data set here",
        ),
        (
            "exiting_script",
            "import sys; sys.exit('usage: train')",
            r"^exiting_script:make: importing exiting_script called exit \(SystemExit: usage: train\); put what a",
        ),
    ],
)
def test_a_module_that_fails_at_import(
    name: str, program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=message):
        get(f"{name}:make")


def test_parts_in_evaluation_mode_stay_so() -> None:
    """Frozen statistics of a module that is trained otherwise; a module in evaluation mode is for inference."""
    x = torch.randn(3, 4)
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    module[0].eval()
    made = as_workload("net", (module, (x, x[:, :2]), nn.functional.mse_loss))
    assert [part.training for part in made.module] == [False, True]
    given = module.eval(), (x, x[:, :2]), nn.functional.mse_loss
    with pytest.raises(UsageError, match=r"^net: the module is in eval mode, and .*; call train\(\) on it"):
        as_workload("net", given)
    assert not as_workload("net", given, "none").module.training
