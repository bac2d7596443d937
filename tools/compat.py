"""The core's tests, the gate on three networks and the GPU rehearsal under another torch, in an environment of its own.

    python tools/compat.py --torch 2.14.1 [--python python3.12] [--numpy 2.5.0]

The environment is kept in .compat/. Dependencies have the versions of constraints.txt but for those that torch or numpy
decide. A row for these versions is written to benchmarks/results/compat.txt, one for each torch.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "results" / "compat.txt"
NETWORKS = "mlp,seed-bert,seed-unet"
CORE = (
    "capture",
    "checkpointing",
    "complexes",
    "cost",
    "fission",
    "fuzz",
    "graph",
    "ops",
    "planners",
    "randomness",
    "report",
    "rewrite",
    "runtime",
    "search",
    "seed",
    "simulate",
    "training",
)
"""Folders of tests that no neighbour is needed for, and that decide whether a step is captured and planned rightly."""
VERSIONS = """
import platform, numba, numpy, torch
print(torch.__version__, platform.python_version(), numpy.__version__, numba.__version__, sep="|")
"""


def main() -> int:
    """Run the three parts; 0 if all are green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="a release, as pip names it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that makes the environment")
    parser.add_argument("--numpy", default="", help="another release of numpy than that of constraints.txt")
    parser.add_argument("--workers", default="2", help="parallel test processes")
    asked = parser.parse_args()
    python = environment(asked.torch, asked.python, asked.numpy)
    versions = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
    parts = {
        "core's tests": lambda: tests(python, asked.workers),
        "gate": lambda: gate(python),
        "GPU rehearsal": lambda: rehearsal(python),
    }
    found = {}
    for name, part in parts.items():
        print(f"== {name}, torch {asked.torch}", flush=True)
        found[name] = part()
        print(f"== {name}: {found[name]}", flush=True)
    write_row(versions.split("|"), list(found.values()))
    return 0 if all(each.startswith("green") for each in found.values()) else 1


def environment(torch: str, python: str, numpy: str) -> str:
    """Make the environment where it is missing; return its interpreter."""
    place = ROOT / ".compat" / "-".join(each for each in (torch, Path(python).resolve().name, numpy) if each)
    inside = str(place / "bin" / "python")
    if (place / "ready").exists():
        return inside
    free = r"torch|torchvision|setuptools" + ("|numpy|numba|llvmlite" if numpy else "")
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not re.match(rf"({free})==", line)]
    kept += [f"torch=={torch}", *([f"numpy=={numpy}"] if numpy else [])]
    subprocess.run([python, "-m", "venv", place], check=True)
    (place / "constraints.txt").write_text("\n".join(kept) + "\n")
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"-c{place / 'constraints.txt'}"]
    subprocess.run([*pip, "setuptools>=77", "torch"], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", f"{ROOT}[test,ort]"], check=True)
    (place / "ready").touch()
    return inside


def run(command: list[str]) -> tuple[int, str, float]:
    """Return code, output, and seconds of a command whose output is also shown."""
    began, lines = time.monotonic(), []
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return child.returncode, "".join(lines), time.monotonic() - began


def outcome(code: int, printed: str) -> str:
    """What a row says of a run of pytest, by its last line."""
    counts = re.findall(r"(\d+ (?:failed|passed|error)s?)", printed.splitlines()[-1])
    return f"{'red' if code else 'green'}: {', '.join(counts)}"


def tests(python: str, workers: str) -> str:
    """The core's folders and the tests beside them."""
    folders = [f"tests/{each}" for each in CORE]
    code, printed, _ = run([python, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal", *folders])
    return outcome(code, printed)


def gate(python: str) -> str:
    """Baselines of three networks are stored, and judge a second run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pytest", f"--magis-models={NETWORKS}", f"--magis-baselines={folder}", "-q"]
        stored, _, _ = run([*command, "--magis-update=new"])
        judged, printed, _ = run(command)
    return outcome(stored or judged, printed)


def rehearsal(python: str) -> str:
    """What a GPU machine runs, on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        small = ("--device=cpu", "--preset=small", "--models=mlp")
        code, _, seconds = run([python, "tools/gpu/run.py", f"--out={folder}", *small])
    return f"{'red' if code else 'green'}: {seconds:.0f} s"


def write_row(versions: list[str], found: list[str]) -> None:
    """Put the row in the place of an earlier one for the same torch, or behind the others."""
    heads = ["torch", "python", "numpy", "numba", "date", "core's tests", "gate", "GPU rehearsal"]
    row = [*versions, f"{dt.datetime.now(tz=dt.UTC).date()}", *found]
    lines = TABLE.read_text().splitlines()[3:] if TABLE.exists() else []
    lines = [line for line in lines if line.split()[0].partition("+")[0] != versions[0].partition("+")[0]]
    title = f"make compat: the gate's networks are {NETWORKS}"
    widths = (12, 8, 7, 7, 11, 28, 18, 0)
    head, made = ("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in (heads, row))
    rows = sorted([*lines, made], key=lambda line: [int(each) for each in re.findall(r"\d+", line.split()[0])][:3])
    TABLE.write_text("\n".join([title, "", head, *rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
