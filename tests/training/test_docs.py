"""The examples of docs/optimize.md run as they stand, one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch


def test_the_examples_run(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (repository / "docs" / "optimize.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/optimize.md", "exec"), names)
    assert names["loss"].ndim == 0
    assert not torch.distributed.is_initialized()
    assert "peak memory" in capsys.readouterr().out
