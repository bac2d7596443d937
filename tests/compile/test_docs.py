"""The examples of docs/compile.md and docs/checkpoint-policy.md run as they stand, one after another."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from magis.extensions.compile.dynamo_backend import magis
from tests.compile.nets import fresh_dynamo


def _run(path: Path, *, but_for: str = "") -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    example = ModuleType("example")
    sys.modules["example"] = example  # torch 2.11's dynamo imports the module of each function that it compiles
    try:
        for block in blocks:
            if but_for and but_for in block:
                continue
            exec(compile(block, path.name, "exec"), vars(example))
    finally:
        del sys.modules["example"]
    return vars(example)


def test_compile(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "magis" not in torch.compiler.list_backends():  # an installation older than the entry point
        torch._dynamo.register_backend(magis, name="magis")
    with fresh_dynamo():
        names = _run(repository / "docs" / "compile.md")
    assert names["reports"][0].memory_ratio <= 0.7
    out = capsys.readouterr().out
    assert "recomputed" in out
    assert out.splitlines()[-1].endswith(f"measured: {names['tags'][0].saved_bytes}")


def test_checkpoint_policy(
    repository: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = "" if find_spec("torch_remat") else "torch_remat"
    names = _run(repository / "docs" / "checkpoint-policy.md", but_for=missing)
    assert names["chosen"]
    assert names["x"].requires_grad
    assert "blocks recomputed" in capsys.readouterr().out
