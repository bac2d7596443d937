"""What runs for real beside a simulated step is bounded ahead; what is wrong is said from fake tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from magis.cases.check import check_case
from magis.errors import CaptureError, UsageError
from magis.models import from_function
from magis.ops import fake_results
from magis.planner.bench import Bench
from magis.planner.smaller_steps import MOST_BYTES, MOST_SECONDS, seconds_on_cpu, smaller_step
from magis.planner.workload_source import STEPS, expected_too_slow
from magis.results import Case
from tests.api import bounded_nets

NETS = "tests.api.bounded_nets"
MOST_RESIDENT = 2 << 30
PLANNED = """
import json, sys
import magis
from magis.results import Case
case = Case(sys.argv[1], "magis", "sim:h200", "paper", memory_ratio=0.8, budget=100)
result = magis.run_case(case)
# not ru_maxrss, which begins with the peak of the process that started this one
(resident,) = (int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps([result.original.simulated.peak_bytes, result.conformance, resident]))
"""


def case(name: str, device: str = "sim:h200") -> Case:
    return Case(f"{NETS}:{name}", "eager", device, "paper")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("long", " of 131072"),
        ("wide", "2 of 12 blocks"),
        ("checks", "batch of 2"),
        ("keeps_tables", "batch of 2"),
        ("reads_lengths", "2048 of 4194304"),
        ("pictures", " of 2048"),
        ("recurrent", "batch of 2"),
    ],
)
def test_a_step_of_any_size_is_planned_in_little_memory(name: str, said: str) -> None:
    command = [sys.executable, "-c", PLANNED, f"{NETS}:{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, conformance, resident = json.loads(done.stdout.splitlines()[-1])
    assert peak > MOST_BYTES
    assert said in conformance
    assert resident < MOST_RESIDENT


@pytest.mark.parametrize("name", ["long", "wide", "pictures"])
def test_a_smaller_step_is_one_that_fits_and_the_module_is_whole_again(name: str) -> None:
    subject = Bench().subject(case(name))
    before = [name for name, _ in subject.traced.module.named_parameters()]
    with smaller_step(subject.traced, subject._captured) as small:
        assert small is not None
        assert small.nbytes <= MOST_BYTES
        assert small.seconds <= MOST_SECONDS
        assert small.seconds < seconds_on_cpu(subject.captured.graph)
    assert [name for name, _ in subject.traced.module.named_parameters()] == before


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss])
def test_targets_of_patches_shrink_with_their_picture(loss: Callable[..., Tensor]) -> None:
    """The number of patches is an area. A target of another size would be broadcast, with a warning: another step."""
    subject = Bench().subject(case("patches"), from_function("patches", partial(bounded_nets.patches, loss)))
    assert " of 256" in subject.conformance


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_step_that_broadcasts_its_target_is_checked() -> None:
    def build() -> tuple[object, ...]:
        net = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))
        return net, (torch.randn(1 << 20, 64), torch.randn(1, 1)), F.mse_loss

    assert "batch of 2" in Bench().subject(case("broadcast"), from_function("broadcast", build)).conformance


@pytest.mark.parametrize("device", ["sim:h200", "cpu"])
@pytest.mark.parametrize("name", ["single_batch", "a_list", "text_for_inputs", "many_losses", "wrong_width"])
def test_what_is_wrong_on_fake_tensors_is_not_built_for_real(name: str, device: str) -> None:
    bounded_nets.MADE.clear()
    told: list[str] = []
    with pytest.raises((UsageError, CaptureError)) as caught:
        check_case(case(name, device), progress=told.append)
    assert "\n" not in str(caught.value)
    assert [name] == bounded_nets.MADE
    assert told == []


@pytest.mark.parametrize(("batch", "length"), [(64, 300), (200, 40), (130, 130)])
def test_bytes_that_recurrent_layers_pack_are_known_without_running_long_ones(
    batch: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_results, "_MOST_ASKED", 0)
    fake_results._packed_bytes.cache_clear()
    asked: list[int] = []
    made = fake_results._zeros

    def counted(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape[0] * shape[1] if len(shape) == 3 else 0)
        return made(shape, stride, dtype)

    monkeypatch.setattr(fake_results, "_zeros", counted)
    weights = [((128, 32), (32, 1), torch.float32)] * 2 + [((128,), (1,), torch.float32)] * 2
    states = [((1, batch, 32), (batch * 32, 32, 1), torch.float32)] * 2
    sequence = ((length, batch, 32), (batch * 32, 32, 1), torch.float32)
    rest = (False, (), 2, 32, 1, True, False, False, True)
    given = (sequence, *weights, *states, *rest)
    found = fake_results._packed_of_any_size("aten.mkldnn_rnn_layer.default", given)
    assert max(asked) < batch * length
    assert found == pytest.approx(fake_results._packed_bytes("aten.mkldnn_rnn_layer.default", given), rel=1e-3)


def test_a_step_is_not_run_where_a_smaller_one_tells_that_it_takes_too_long() -> None:
    assert expected_too_slow(1.0, 60.0) == ""
    said = f"a step would take about 1400 s here, running a case {STEPS} of them, and may take 60 s"
    assert expected_too_slow(1404.2, 60.0) == said
    subject = Bench().subject(case("wide", "cpu"))
    graph = subject.captured.original.graph
    assert subject.expected_seconds(graph, 1e9) == seconds_on_cpu(graph)
    assert subject.expected_seconds(graph, 0.1) > 0.1
    assert "workload" not in vars(subject)  # nothing of the step's size was built
