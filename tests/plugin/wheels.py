"""Wheels of a package that holds one number, and pip told to find nothing else; a repository to measure versions of."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path


def git(folder: Path, *arguments: str) -> None:
    """A command of git, by somebody."""
    name = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)


def wheel_of(folder: Path, version: str, inner: int, package: str = "net_width") -> Path:
    """A release of a package with the module `net_width`, which holds the number."""
    info = f"{package}-{version}.dist-info"
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("net_width.py", f"INNER = {inner}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def offer(folder: Path, monkeypatch, **widths: int) -> None:
    """Releases of the package `net_width` (`v1_0=64`: 1.0 has `INNER = 64`), and kept environments below `folder`."""
    for name, inner in widths.items():
        wheel_of(folder, name.removeprefix("v").replace("_", "."), inner)
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
