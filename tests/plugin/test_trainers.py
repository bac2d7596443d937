"""docs/trainers.md as it stands: scripts that train, stored, green, and red with the place that grew."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import magis
from magis.current_gate import BLOCK_GATE
from magis.extensions.compile.dynamo_backend import magis as backend
from tests.compile.nets import fresh_dynamo

transformers = pytest.importorskip("transformers", reason="needs the extra hf: transformers is not installed")
pytest.importorskip("accelerate", reason="needs the extra hf: accelerate is not installed")
pytestmark = pytest.mark.filterwarnings("default")  # theirs, of deprecations between them and torch


@pytest.fixture
def page(gate, repository):
    """The page; the gate has its files."""
    gate.use_real_core()
    text = (repository / "docs" / "trainers.md").read_text(encoding="utf-8")
    for name, content in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (gate.root / name).write_text(content, encoding="utf-8")
    return text


def test_the_script_is_gated_as_the_page_says(gate, page):
    commands = re.findall(r"^\$ pytest (\S+)(?: (--\S+))?", page, re.MULTILINE)
    assert commands == [("test_train.py", "--magis-update=new"), ("test_train.py", "")]
    gate(*commands[0]).assert_outcomes(passed=1)
    stored = gate.baseline("test_train.test_training")["configurations"]["small"]["cases"]
    assert list(stored) == ["peak-step1", "peak-step2"]
    gate("test_train.py").assert_outcomes(passed=1)
    script = gate.root / "train.py"
    script.write_text(script.read_text().replace('"n_embd": 64', '"n_embd": 72'))
    result = gate("test_train.py")
    result.assert_outcomes(failed=1)
    for number in (1, 2):
        result.stdout.fnmatch_lines([f"test_train.test_training?peak-step{number}?:", "worse: block tensor bytes: *"])
    result.stdout.fnmatch_lines(["grew at the peak: GPT2LMHeadModel.transformer.h.*"])
    assert "Traceback" not in result.stdout.str()


def test_the_script_alone_prints_its_peaks(gate, page):
    gate.monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=gate.root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"^magis\.MagisCallback: step (\d): peak of tensors \d", done.stdout, re.MULTILINE)
    assert said == ["1", "2"]


def test_the_other_scripts_are_gated(gate, page):
    pytest.importorskip("lightning.pytorch", reason="needs the extra lightning: lightning is not installed")
    (gate.root / "test_lightning.py").write_text("import train_lightning\n\ntest_it = train_lightning.main\n")
    gate.accept("test_lightning.py", "test_loop.py")
    gate("test_lightning.py", "test_loop.py").assert_outcomes(passed=2)


def test_a_training_without_its_steps_is_red(gate, page):
    script = gate.root / "train.py"
    script.write_text(script.read_text().replace("max_steps=3", "max_steps=1"))
    result = gate("test_train.py", "--magis-update=new")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["magis.MagisCallback: training ended after 1 step: no peak of step 2; *"])


def test_a_plan_trains_in_less_memory_with_the_same_losses(gate, page):
    if "magis" not in torch.compiler.list_backends():  # an installation older than the entry point
        torch._dynamo.register_backend(backend, name="magis")
    (gate.root / "test_planned.py").write_text(
        """
import magis
from train_planned import train
from magis.current_gate import BLOCK_GATE


def test_it():
    BLOCK_GATE.set(None)
    found = []
    for ratio in (None, 0.7):
        callback = magis.MagisCallback()
        found.append((train(ratio, callback), callback.peaks[2].tensor_bytes))
    (eager, needed), (planned, fewer) = found
    assert eager == planned
    assert len(eager) == 3
    assert fewer < 0.8 * needed
"""
    )
    with fresh_dynamo():
        gate("test_planned.py").assert_outcomes(passed=1)


def test_a_plan_in_lightning_trains_in_less_memory_with_the_same_losses(gate, page):
    pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning: lightning is not installed")
    if "magis" not in torch.compiler.list_backends():
        torch._dynamo.register_backend(backend, name="magis")
    gate.monkeypatch.syspath_prepend(gate.root)
    from train_lightning import Classifier

    class Losses(pl.Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, _trainer, _module, outputs, *_):
            self.found.append(float(outputs["loss"]))

    def trained(compiled):
        torch.manual_seed(0)
        module = Classifier()
        module.net = torch.nn.Sequential(
            *(part for _ in range(5) for part in (torch.nn.Linear(32, 32), torch.nn.GELU()))
        )
        rows = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.randint(0, 32, (512,)))
        callback, losses = magis.LightningCallback(steps=(2,)), Losses()
        trainer = pl.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[callback, losses],
        )  # fmt: skip
        token = BLOCK_GATE.set(None)
        try:
            trainer.fit(compiled(module), torch.utils.data.DataLoader(rows, batch_size=128))
        finally:
            BLOCK_GATE.reset(token)
        return losses.found, callback.peaks[2]

    def plan(module):
        return torch.compile(module, backend="magis", options={"memory_ratio": 0.7})

    with fresh_dynamo():
        (eager, needed), (planned, fewer) = trained(lambda module: module), trained(plan)
    assert eager == planned
    assert len(eager) == 3
    assert fewer.tensor_bytes < 0.8 * needed.tensor_bytes


def test_accelerates_message_is_the_one_of_the_page(page, tmp_path):
    (said,) = re.findall(r"^ValueError: (.* is not a valid DynamoBackend)$", page, re.MULTILINE)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), torch_compile=True, torch_compile_backend="magis", report_to="none"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments)
