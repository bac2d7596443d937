"""Callbacks of Hugging Face's Trainer and of Lightning: bytes of real steps, errors, and what stays on: nothing."""

from __future__ import annotations

import atexit
import gc
import pickle  # noqa: TID251 (spawned processes of both trainers do)
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

import magis
from magis.current_gate import BLOCK_GATE
from magis.extensions.compile.trainers import LightningCallback, StepPeaks, _Library

pytestmark = pytest.mark.filterwarnings("default")  # theirs, of deprecations between them and torch
WEIGHTS = 4 * (16 * 64 + 64 + 64 * 4 + 4)
STATE = 2 * WEIGHTS + 4 * 4
"""Of Adam: two moments of each weight, and four counts of steps."""


class Net(nn.Module):
    """Returns its loss, in a dictionary as models of transformers; an error where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
        self.calls = 0
        self.fails_at: int | None = None
        self.epoch_ends_at: int | None = None
        """The batch, in the first one."""
        self.modes_of_evaluation: set[int] = set()
        """How many dispatch modes were on in each."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("theirs")
        if not self.training:
            self.modes_of_evaluation.add(torch._C._len_torch_dispatch_stack())
        return {"loss": nn.functional.cross_entropy(self.net(inputs), labels)}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixty-four of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.full((16,), float(index)), "labels": torch.tensor(index % 4)}


@contextmanager
def outside_of_a_test() -> Iterator[None]:
    """Nothing is gated: tests/plugin/test_trainers.py does that."""
    token = BLOCK_GATE.set(None)
    try:
        yield
    finally:
        BLOCK_GATE.reset(token)


def hugging_face(
    net: Net,
    *others: Any,
    accumulated: int = 1,
    max_steps: int = 4,
    evaluates: str = "no",
    optimizers: tuple[Any, Any] = (None, None),
    **asked: Any,
) -> StepPeaks:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")
    pytest.importorskip("accelerate", reason="needs the extra hf: accelerate is not installed")
    callback = magis.MagisCallback(**asked)
    assert isinstance(callback, transformers.TrainerCallback)
    arguments = transformers.TrainingArguments(
        max_steps=max_steps, num_train_epochs=0, gradient_accumulation_steps=accumulated, report_to="none",
        per_device_train_batch_size=4, save_strategy="no", use_cpu=True, disable_tqdm=True, eval_strategy=evaluates,
        prediction_loss_only=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        net, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[callback, *others], optimizers=optimizers
    )
    try:
        with outside_of_a_test():
            trainer.train()
    finally:
        assert "training_step" not in vars(trainer)
    return callback


def lightning(
    net: Net, *others: Any, accumulated: int = 1, max_steps: int = 4, validates_every: int | None = None, **asked: Any
) -> StepPeaks:
    pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning: lightning is not installed")

    class Trained(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def on_train_batch_start(self, _batch: Any, number: int) -> int | None:
            return -1 if (self.current_epoch, number) == (0, net.epoch_ends_at) else None

        def training_step(self, batch: dict[str, Tensor], _number: int) -> Tensor:
            return self.net(**batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: dict[str, Tensor], _number: int) -> None:
            self.net(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = magis.LightningCallback(**asked)
    assert isinstance(callback, pl.Callback)
    trainer = pl.Trainer(
        max_steps=max_steps, accumulate_grad_batches=accumulated, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, *others], val_check_interval=validates_every,
    )  # fmt: skip
    with outside_of_a_test():
        data = torch.utils.data.DataLoader(Rows(), batch_size=4)
        trainer.fit(Trained(), data, data if validates_every else None)
    return callback


Train = Callable[..., StepPeaks]


@pytest.fixture(params=[hugging_face, lightning], ids=["hf", "lightning"])
def train(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains with one of the libraries; afterwards no mode, no hook, nothing at exit is left, whatever happened."""
    monkeypatch.chdir(tmp_path)
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", lambda function, *_: registered.append(function))
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    yield request.param
    assert torch._C._len_torch_dispatch_stack() == 0
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before
    assert gc.isenabled()
    assert not [each for each in registered if getattr(each, "__func__", None) is StepPeaks._step_fails]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_first_step_makes_the_state_and_a_later_one_does_not(train: Train, accumulated: int) -> None:
    torch.manual_seed(0)
    peaks = train(Net(), accumulated=accumulated, steps=(1, 3)).peaks
    assert list(peaks) == [1, 3]
    first, later = peaks.values()
    assert STATE <= first.kept_bytes - later.kept_bytes < STATE + WEIGHTS // 8
    assert first.tensor_bytes >= STATE + WEIGHTS
    assert WEIGHTS <= later.tensor_bytes < first.tensor_bytes
    for peak in peaks.values():
        assert peak.allocated_bytes is not None
        assert 0 <= peak.allocated_bytes - peak.tensor_bytes < 512
        assert any("net" in row.module for row in peak.at_peak.held)


def test_weights_are_those_of_a_training_without_it(train: Train) -> None:
    trained = []
    for steps in ((1, 2), (100,)):
        torch.manual_seed(0)
        net = Net()
        train(net, steps=steps)
        trained.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(map(torch.equal, *trained))


def test_an_error_in_a_measured_step_goes_on_as_it_was(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    net.fails_at = 2
    with pytest.raises(ValueError, match=r"^theirs$") as caught:
        train(net)
    assert caught.value.__context__ is None
    assert steps_said(capfd) == ["step 1:", "step 2 ended ahead of its update: ValueError; it was not measured"]


def steps_said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What it printed of steps, each line; of a measured one no figures."""
    said = [line.partition(": ")[2] for line in capfd.readouterr().out.splitlines() if line.startswith("magis.")]
    return [f"{line[:6]}:" if line[6:7] == ":" else line for line in said if line.startswith("step")]


def test_a_step_with_a_validation_in_it_is_not_measured(capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    asked: dict[str, Any] = {"steps": (1, 2, 3), "evaluation": False}
    callback = lightning(net, accumulated=2, max_steps=3, validates_every=3, **asked)
    assert list(callback.peaks) == [1, 3]  # the other validation comes between steps
    assert steps_said(capfd) == ["step 1:", "step 2 has a validation in it; it was not measured", "step 3:"]
    assert net.modes_of_evaluation == {0}


def test_an_epoch_that_a_module_ends_ends_the_step(capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    net.epoch_ends_at = 1
    assert list(lightning(net, steps=(1, 2, 3)).peaks) == [1, 3]
    assert steps_said(capfd) == ["step 1:", "step 2 ended ahead of its update; it was not measured", "step 3:"]


def test_an_epoch_that_a_callback_ends_ends_the_step(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")

    class Stops(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_substep_end(self, _args: Any, state: Any, control: Any, **_given: Any) -> None:
            control.should_epoch_stop = state.global_step == 1

    net = Net()
    assert list(hugging_face(net, Stops(), accumulated=2, evaluates="epoch", evaluation=False).peaks) == [1]
    assert steps_said(capfd) == ["step 1:", "step 2 ended ahead of its update; it was not measured"]
    assert net.modes_of_evaluation == {0}


def test_a_scheduler_with_slots_is_left_alone() -> None:
    class Constant:
        __slots__ = ()

        def step(self) -> None: ...

        def get_last_lr(self) -> list[float]:
            return [0.1]

    net = Net()
    callback = hugging_face(net, optimizers=(torch.optim.SGD(net.parameters()), Constant()))
    assert list(callback.peaks) == [1, 2]


def test_it_is_pickled_without_its_peaks(train: Train) -> None:
    callback = train(Net(), name="net", tolerance=0.5, steps=(1, 3))
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is type(callback)
    assert (again.name, again.tolerance, again.steps, again.peaks) == ("net", 0.5, (1, 3), {})
    assert list(callback.peaks) == [1, 3]


def test_a_training_of_fewer_steps_says_so(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    assert list(train(Net(), max_steps=1).peaks) == [1]
    assert "training ended after 1 step: no peak of step 2\n" in capfd.readouterr().out
    assert list(train(Net(), max_steps=0).peaks) == []
    assert "training ended after 0 steps: no peak of step 1, 2\n" in capfd.readouterr().out


def test_two_of_them_are_refused(train: Train) -> None:
    kind, library = ("MagisCallback", "transformers") if train is hugging_face else ("LightningCallback", "lightning")
    pytest.importorskip(library, reason=f"{library} is not installed")
    with pytest.raises(magis.UsageError, match="the trainer has two; name all steps in one"):
        train(Net(), getattr(magis, kind)(steps=(3,)))


def test_an_error_of_another_callback_ends_the_step() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")

    class Stops(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_pre_optimizer_step(self, *_: Any, **_given: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hugging_face(Net(), Stops())
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(
    ("make", "asked", "said"),
    [
        (magis.MagisCallback, {"steps": (0,)}, "MagisCallback: steps=(0,); number the steps from 1 on"),
        (magis.MagisCallback, {"steps": 2}, "MagisCallback: steps=2; number"),
        (magis.LightningCallback, {"steps": ()}, "LightningCallback: steps=(); number"),
        (magis.LightningCallback, {"tolerance": -1}, "tolerance=-1; give a share such as 0.01"),
        (magis.MagisCallback, {"tolerance": float("inf")}, "tolerance=inf; give"),
        (magis.MagisCallback, {"tolerance": True}, "tolerance=True; give"),
        (magis.MagisCallback, {"name": "a b/c"}, "name='a b/c'; use letters, digits, '_', '-' and '.', 90 at most"),
        (magis.MagisCallback, {"name": 3}, "name=3; use letters"),
        (magis.LightningCallback, {"name": "n" * 95}, "nnn'; use letters"),
    ],
)
def test_bad_arguments_are_one_line(make: Callable[..., object], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(magis.UsageError) as caught:
        make(**asked)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "modules", "extra"),
    [
        (magis.MagisCallback, ("transformers",), "hf"),
        (magis.LightningCallback, ("lightning.pytorch", "lightning", "pytorch_lightning"), "lightning"),
    ],
)
def test_without_its_library_it_says_what_to_install(
    make: Callable[..., object], modules: tuple[str, ...], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(magis.UsageError, match=rf"which is not installed; pip install 'pytest-magis\[{extra}\]'"):
        make()


def test_naming_it_loads_neither_library(fresh_python: Callable[[str], str]) -> None:
    program = "import sys, magis; magis.MagisCallback; print({'transformers', 'lightning'} & set(sys.modules))"
    assert fresh_python(program) == "set()\n"


def test_the_first_evaluation_is_measured(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    net = Net()
    asked: dict[str, Any] = {"evaluates": "epoch"} if train is hugging_face else {"validates_every": 2}
    callback = train(net, max_steps=34, **asked)
    assert callback.evaluation is not None
    assert 0 < callback.evaluation.tensor_bytes < callback.peaks[2].tensor_bytes
    assert callback.evaluation.phases == {"evaluation": callback.evaluation.tensor_bytes}
    assert len(net.modes_of_evaluation) == 2  # those behind it are as without the callback
    assert capfd.readouterr().out.count(": evaluation: peak of tensors ") == 1


class Base:
    """A library's class of callbacks."""


class OwnCallback(LightningCallback):
    """Of a loop below, which calls what Lightning would."""

    _library = _Library((__name__,), "Base", "own")


class Loop:
    """What callbacks see of a Lightning trainer."""

    is_global_zero, sanity_checking, global_step, device = True, False, 0, torch.device("cpu")

    def __init__(self, callback: Any, step: Callable[[], object], evaluate: Callable[[], object]) -> None:
        self.callbacks = [callback]
        with outside_of_a_test():
            callback.on_fit_start(self, self)
            for number in range(5):
                callback.on_train_batch_start(self, self, None, number)
                step()
                self.global_step += 1
                callback.on_train_batch_end(self, self, None, None, number)
                callback.on_validation_start(self, self)
                evaluate()
                callback.on_validation_end(self, self)
            callback.on_fit_end(self, self)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_step_keeps_for_the_next_counts_in_that(*, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("magis.extensions.compile.trainers._tell", said.append)  # without tqdm
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(net.parameters())
    x, last = torch.randn(128, 64), [torch.zeros(())]

    def step() -> None:
        loss = net(x).square().mean()
        loss.backward(retain_graph=keeps)
        optimizer.step()
        optimizer.zero_grad()
        last[:] = [loss if keeps else loss.detach()]

    @torch.no_grad()
    def evaluate() -> None:
        with magis.phase("scores"):
            net(x[:8])

    callback: Any = OwnCallback(steps=(1, 4))
    Loop(callback, step, evaluate)
    first, fourth = callback.peaks[1].tensor_bytes, callback.peaks[4].tensor_bytes
    graph = 4 * 128 * (256 + 256 + 64)  # what the GELU, the second layer and the square have saved
    assert fourth - first == graph + 4 if keeps else 0 <= fourth - first <= 4  # and the loss
    assert list(callback.peaks) == [1, 4]
    assert callback.evaluation.phases == {"evaluation": 0, "scores": 4 * 8 * (256 + 256)}
    heads = [line.partition(": peak of tensors ")[0] for line in said]
    assert heads == [f"magis.OwnCallback: {what}" for what in ("step 1", "evaluation", "step 4")]
