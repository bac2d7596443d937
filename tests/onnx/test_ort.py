"""Training steps in ONNX Runtime: the numbers of eager, the bytes of its allocator, and clear refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from magis.capture import Workload
from magis.cases.run_case import run_case
from magis.errors import UsageError
from magis.extensions.models.building import REAL
from magis.extensions.models.convnets import ResNetConfig, resnet
from magis.extensions.models.decoders import GptConfig, GptNeoConfig, gpt, gpt_neo
from magis.extensions.models.encoders import BertConfig, VitConfig, bert, vit
from magis.extensions.models.unet import UNetConfig, unet
from magis.extensions.onnx.ort_step import check_installed, export_step, make_ort_step
from magis.ops.optimizers import OptimizerSpec
from magis.planner.bench import Bench
from magis.results import Case
from magis.runtime.steps import EagerStep
from magis.strategies.rank_step import has_dropout

pytest.importorskip("onnxruntime")
ort_memory = pytest.importorskip("magis.extensions.onnx.ort_memory")

GPT = GptConfig(4, 16, layers=2, width=32, heads=2, vocab_size=50, max_positions=16, dropout=0.0)
BERT = BertConfig(4, 16, layers=1, width=32, heads=2, vocab_size=50, max_positions=16, dropout=0.0)
NEO = GptNeoConfig(4, 16, layers=2, width=32, heads=2, window=4, vocab_size=50, max_positions=16)
NETWORKS: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: gpt(GPT, REAL, "gpt", 0),
    "bert": lambda: bert(BERT, REAL, "bert", 0),
    "gpt_neo": lambda: gpt_neo(NEO, REAL, "gpt_neo", 0),
    "vit": lambda: vit(VitConfig(4, 16, 8, 1, 32, 64, 2, 5), REAL, "vit", 0),
    "resnet": lambda: resnet(ResNetConfig(8, 32, (1, 1, 1, 1), 4, 1, 4, 5), REAL, "resnet", 0),
    "unet": lambda: unet(UNetConfig(batch_size=2, image_size=32, width=4), REAL, "unet", 0),
}


def eager(work: Workload) -> EagerStep:
    return EagerStep(work.module, work.inputs, work.targets, work.loss_fn, work.optimizer, explicit_attention=True)


def in_ort(work: Workload, *, optimized: bool = True, **how: Any) -> Any:
    """The step of a workload in ONNX Runtime."""
    return make_ort_step(work, export_step(work, **how), optimized=optimized)


def gradients(work: Workload) -> dict[str, Tensor]:
    step = eager(replace(work, optimizer=OptimizerSpec("gradients")))
    step.prepare()
    step.run()
    return dict(step.gradients())


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_as_exact_as_eager_s(name: str) -> None:
    """At most eight times as far from float64 as eager's, plus rounding: other kernels add up in another order."""
    exact = gradients(NETWORKS[name]().to("float64"))
    plain = gradients(NETWORKS[name]())
    step = in_ort(replace(NETWORKS[name](), optimizer=OptimizerSpec("gradients")), optimized=False)
    step.run()
    found = step.results()[1:]
    assert len(found) == len(exact)
    largest = max(float(each.abs().max()) for each in exact.values())
    for (key, wanted), gradient in zip(exact.items(), found, strict=True):
        allowed = 8 * (plain[key] - wanted).abs().max() + 1e-6 * largest
        assert (gradient - wanted).abs().max() <= allowed, key


@pytest.mark.parametrize(("kind", "optimized"), [("momentum", True), ("adam", False), ("adamw", True)])
def test_three_steps_equal_eager_s(kind: str, optimized: bool) -> None:
    momentum = 0.9 if kind == "momentum" else 0.0
    rule = OptimizerSpec(kind, lr=1e-2, momentum=momentum, weight_decay=0.1, eps=1e-3)
    ours, theirs = (replace(NETWORKS["gpt"](), optimizer=rule) for _ in range(2))
    step, reference = in_ort(ours, optimized=optimized), eager(theirs)
    for _ in range(3):
        reference.prepare()
        torch.testing.assert_close(step.run(), reference.run(), rtol=1e-5, atol=0)
    pairs = zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True)
    for (key, mine), other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5, msg=key)
    assert step.state().keys() == reference.state().keys()
    for key, tensor in reference.state().items():
        torch.testing.assert_close(step.state()[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


def test_statistics_of_batch_norm_are_updated_once_a_step() -> None:
    ours, theirs = (replace(NETWORKS["resnet"](), optimizer=OptimizerSpec("sgd", lr=1e-3)) for _ in range(2))
    step, reference = in_ort(ours), eager(theirs)
    for _ in range(3):
        step.run()
        reference.prepare()
        reference.run()
    for (key, mine), other in zip(ours.module.named_buffers(), theirs.module.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=key)
    assert int(ours.module.get_buffer("stem_norm.num_batches_tracked")) == 3


def test_the_module_keeps_its_parameters_and_takes_what_is_loaded_into_them() -> None:
    work = NETWORKS["gpt"]()
    parameters = list(work.module.parameters())
    start = {key: value.clone() for key, value in work.module.state_dict().items()}
    step = in_ort(work)
    first = float(step.run())
    assert all(a is b for a, b in zip(parameters, work.module.parameters(), strict=True))
    assert float(step.run()) < first
    work.module.load_state_dict(start)
    assert float(step.run()) == first


def test_dropout_is_drawn_anew_and_used_again_in_the_backward() -> None:
    """The gradient of a sum of dropped outputs is the mask times the inputs: the mask can be solved for."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    x = torch.randn(4, 64)
    step = in_ort(Workload("drop", module, (x,), (), torch.sum, OptimizerSpec("gradients")))
    masks = []
    for _ in range(2):
        loss = step.run()
        mask = torch.linalg.lstsq(x.T.double(), step.results()[1].T.double()).solution
        assert {round(each, 3) for each in mask.flatten().tolist()} <= {0.0, 2.0}
        dropped = (x.double() @ module[0].weight.T.double()) * mask
        torch.testing.assert_close(loss.double(), dropped.sum().detach(), rtol=1e-3, atol=1e-3)
        masks.append(mask.round())
    assert not torch.equal(masks[0], masks[1])
    assert 0.35 < float(torch.stack(masks).mean()) / 2 < 0.65


@pytest.mark.parametrize("name", ["bert", "unet"])
def test_half_precision_has_the_gradients_of_float32(name: str) -> None:
    """Within 10% of the norm where a gradient counts at all: nothing is scaled, small numbers lose digits."""
    exact = gradients(NETWORKS[name]())
    work = replace(NETWORKS[name](), optimizer=OptimizerSpec("gradients"))
    step = in_ort(work, precision="amp-float16")
    step.run()
    largest = max(float(each.norm()) for each in exact.values())
    for (key, wanted), gradient in zip(exact.items(), step.results()[1:], strict=True):
        assert (gradient - wanted).norm() <= 0.1 * wanted.norm() + 0.01 * largest, key


@pytest.mark.parametrize(("name", "optimized"), [("gpt", True), ("gpt", False), ("resnet", True)])
def test_predicted_bytes_are_those_that_onnx_runtime_counts(name: str, optimized: bool) -> None:
    work = NETWORKS[name]()
    exported = export_step(work)
    measured = ort_memory.measured_memory(exported, name=work.name, optimized=optimized)
    predicted, terms = ort_memory.predicted_memory(exported, name=work.name, optimized=optimized)
    assert predicted.tensor_bytes == pytest.approx(measured.tensor_bytes, rel=0.01)
    assert measured.tensor_bytes <= measured.peak_bytes <= (measured.reserved_bytes or 0)
    assert sum(term.nbytes for term in terms) == predicted.peak_bytes
    weights = sum(p.nbytes for p in work.module.parameters())
    by_name = {term.name: term.nbytes for term in terms}
    assert by_name["parameter"] == weights
    assert by_name["state"] == 2 * weights
    assert by_name["outputs"] >= 3 * weights


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magis.extensions.onnx.ort_step.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_installed()
    assert str(caught.value) == (
        "the strategy ort needs onnxruntime and onnx, not installed here; pip install 'pytest-magis[ort]'"
    )


def test_a_step_is_exported_once_for_all_cases_and_rough_ratios_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool, bool]] = []

    def counted(work: Workload, *, precision: str, inference: bool) -> Any:
        made.append((precision, inference, has_dropout(work.module)))
        return export_step(work, precision=precision, inference=inference)

    monkeypatch.setattr("magis.extensions.onnx.ort_step.export_step", counted)
    bench = Bench()
    for strategy in ("ort", "ort-unoptimized", "amp+ort", "ort-inference"):
        case = Case("tests.ranks.own_strategies:small_net", strategy, "cpu", "small")
        result = run_case(case, cache=bench, rough=True)
        assert result.identity["onnxruntime"] == version("onnxruntime")
        ratio = result.ratio
        assert strategy == "ort-inference" if ratio is None else 0 < ratio.low <= ratio.ratio <= ratio.high < math.inf
    assert sorted(made) == [
        ("amp-float16", False, False),
        ("amp-float16", False, True),
        ("float32", False, False),
        ("float32", False, True),
        ("float32", True, True),
    ]
