"""Wheels of a package that holds one number, and pip told to find nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path


def offer(folder: Path, monkeypatch, **widths: int) -> None:
    """Releases of the package `net_width` (`v1_0=64`: 1.0 has `INNER = 64`), and kept environments below `folder`."""
    for name, inner in widths.items():
        version = name.removeprefix("v").replace("_", ".")
        info = f"net_width-{version}.dist-info"
        with zipfile.ZipFile(folder / f"net_width-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("net_width.py", f"INNER = {inner}\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: net-width\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("MAGIS_ENVIRONMENTS", str(folder / "environments"))


NETWORK = """
import pytest, torch
from torch import nn

try:
    from net_width import INNER
except ImportError:
    INNER = 96

@pytest.mark.magis(strategies=["eager"], device="sim:h100")
def test_net():
    module = nn.Sequential(nn.Linear(32, INNER), nn.ReLU(), nn.Linear(INNER, 8))
    return module, (torch.randn(256, 32), torch.randn(256, 8)), nn.functional.mse_loss
"""
"""A network whose width is that of the package, where it is installed."""
