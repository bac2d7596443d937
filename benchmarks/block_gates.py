"""How often gates of blocks are red without a change, and with 1% more bytes: `python benchmarks/block_gates.py [50]`.

Runs the tests of docs/peak.md, each time in a process of its own: first to store their baselines, then as they stand,
then with a tensor planted in each block that is alive at its peak and takes 1% of it (and 4 bytes: a tolerance of 1% is
to be exceeded). Prints how many runs had how many red tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from lib.program import arguments

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "peak.md"
PLANT = """
import json
import os
from pathlib import Path

import pytest
import torch
import magis
from magis.frontends import block_peak

SIZES = json.loads(Path("sizes.json").read_text()) if Path("sizes.json").exists() else {}
PLANTED = bool(os.environ.get("PLANTED"))


@pytest.fixture(autouse=True)
def plant(request, monkeypatch):
    blocks = iter(range(100))
    enter, leave = block_peak.BlockPeak.__enter__, block_peak.BlockPeak.__exit__
    kept = {}

    def entered(self):
        found = enter(self)
        self.place = f"{request.node.name}:{next(blocks)}"
        if PLANTED:
            kept[self.place] = torch.empty(-(-SIZES[self.place] // 100) + 4, dtype=torch.uint8)
        return found

    def left(self, *error):
        result = leave(self, *error)
        kept.clear()
        if not PLANTED:
            SIZES[self.place] = self.tensor_bytes
            Path("sizes.json").write_text(json.dumps(SIZES))
        return result

    monkeypatch.setattr(block_peak.BlockPeak, "__enter__", entered)
    monkeypatch.setattr(block_peak.BlockPeak, "__exit__", left)
"""


def tests_of_page() -> str:
    """The page's blocks of Python as one file."""
    return "\n\n".join(
        re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )


def run(folder: Path, *options: str, planted: bool = False) -> Counter[str]:
    """Outcomes of one run of pytest, by word."""
    settings: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(ROOT), "PLANTED": "1" if planted else ""}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *options, "test_peaks.py"]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, check=False)
    counted = re.findall(r"(\d+) (passed|failed|error)", done.stdout.splitlines()[-1])
    return Counter({word: int(number) for number, word in counted})


def main() -> None:
    """Print both tables."""
    parser = arguments(__doc__)
    parser.add_argument("times", nargs="?", type=int, default=50)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_peaks.py").write_text(tests_of_page(), encoding="utf-8")
        (folder / "conftest.py").write_text(PLANT, encoding="utf-8")
        stored = run(folder, "--magis-update=new")
        print(f"stored: {dict(stored)}", flush=True)
        for planted in (False, True):
            red = Counter(run(folder, planted=planted)["failed"] for _ in range(times))
            print(
                f"{'1% planted' if planted else 'unchanged'}: red tests of {sum(stored.values())} -> runs: {dict(red)}"
            )


if __name__ == "__main__":
    main()
