"""Everything that needs a real GPU, in one command that may be cut off and called again.

    python tools/gpu/run.py --out DIR [--seconds 540] [--device cuda] [--preset paper] [--models all]

In pieces, each in a process of its own, those that succeeded left out the next time (DIR/state.json):

    tests       pytest -m cuda
    profile     magis profile, resumable within itself
    memory-...  the gate's cases at memory ratios 0.8, 0.6, 0.4, model by model
    latency-... the same at latency ratios 1.1 and 1.05
    dtypes      every model at size small in tf32, bfloat16, float16 and bfloat16 autocast
    oom         one model with the allocator held to a share of the memory that eager needs: a simulated original
    trace       one step with swaps, for Perfetto
    report      docs/results-<gpu>.md from the rows so far, beside the paper's figures

A piece that fails is said so, and the next one begins. With --device cpu --preset small --models mlp it is a rehearsal.
Nothing is installed but rustworkx, where it is missing, from wheels in .gpu/wheels (`make wheels`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "tools" / "gpu"
WHEELS, SITE = ROOT / ".gpu" / "wheels", ROOT / ".gpu" / "site"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")
WHERE = """
import sys
from pathlib import Path
from magis import api
api.check_device(sys.argv[1])
print(api.profile_file(Path(), sys.argv[1]))
"""
NEEDED = ("torch", "numpy", "numba", "pandas", "pytest")
DTYPES = ("tf32", "bfloat16", "float16", "amp-bfloat16")
LEAST = 20.0
"""Seconds that must be left for a piece to begin."""


@dataclass(frozen=True)
class Piece:
    """A command, and the file in the folder that takes what it prints."""

    name: str
    command: tuple[str, ...]


def main() -> int:
    """Run what is missing; 0 if all pieces succeeded by now, 3 if some did not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--models", default="resnet50,bert,vit,unet,unetpp,gpt_neo,btlm")
    parser.add_argument("--only", help="names of pieces or their beginnings, by commas")
    asked = parser.parse_args()
    started = time.monotonic()
    out: Path = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    _install()
    done = _read(out)
    pieces = list(_pieces(out, _profiles(asked.device, out), asked.device, asked.preset, asked.models.split(",")))
    # what was never tried comes before what failed or was cut off: one slow piece must not keep the others from running
    for piece in sorted(pieces, key=lambda piece: (piece.name == "report", piece.name in done)):
        wanted = asked.only is None or any(piece.name.startswith(name) for name in asked.only.split(","))
        if not wanted or (done.get(piece.name) == 0 and piece.name != "report"):
            continue
        left = asked.seconds - (time.monotonic() - started)
        if left < LEAST and piece.name != "report":
            print(f"{piece.name}: no time left; run the command again to go on", flush=True)
            continue
        done[piece.name] = _run(piece, out, max(left, LEAST))
        (out / "state.json").write_text(json.dumps(done, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0 if all(code == 0 for code in done.values()) else 3


def _pieces(out: Path, profile: Path, device: str, preset: str, models: Sequence[str]) -> Iterator[Piece]:
    case = (*PYTEST, "-p", "pytest_magis.plugin", f"--magis-device={device}", "--magis-update=new,better,worse")
    where = f"--magis-baselines={ROOT / 'baselines'}" if device != "cpu" else f"--magis-baselines={out / 'baselines'}"
    yield Piece("tests", (*PYTEST, "-m", "cuda", str(ROOT / "tests" / "runtime" / "test_cuda.py")))
    dtypes = ("--dtype", "float32,bfloat16") if device != "cpu" else ()
    command = (sys.executable, "-m", "magis", "profile", "--device", device, "--preset", preset)
    for model in models:
        yield Piece(f"profile-{model}", (*command, "--models", model, *dtypes, "--out", str(profile)))
    for limit in ("memory-0.8", "latency-1.1", "memory-0.6", "latency-1.05", "memory-0.4"):
        kind, _, ratio = limit.partition("-")
        for model in models:
            name = f"{limit}-{model}"
            paper = (
                *case,
                where,
                f"--magis-preset={preset}",
                f"--magis-models={model}",
                f"--magis-csv={out / name}.csv",
                "--magis-csv-full",
            )
            strategies = "eager,magis" if limit == "memory-0.8" else "magis"
            given = (f"--magis-{kind}-ratios={ratio}", f"--magis-strategies={strategies}")
            yield Piece(name, (*paper, *given, f"--magis-resume={out / 'resume' / model}"))
    for dtype in DTYPES if device != "cpu" else ("bfloat16",):
        small = (*case, where, "--magis-preset=small", f"--magis-models={','.join(models)}", f"--magis-dtype={dtype}")
        yield Piece(
            f"dtypes-{dtype}",
            (*small, "--magis-memory-ratios=0.6", f"--magis-csv={out / f'dtype-{dtype}.csv'}", "--magis-csv-full"),
        )
    yield Piece("oom", (sys.executable, str(TOOLS / "out_of_memory.py"), models[0], device, preset))
    yield Piece("trace", (sys.executable, str(TOOLS / "timeline.py"), models[0], device, preset, str(out)))
    yield Piece("report", (sys.executable, str(TOOLS / "report.py"), str(out), device))


def _profiles(device: str, out: Path) -> Path:
    """Where the profile belongs: asked in a process of its own, which alone opens the GPU. A rehearsal's is no
    measurement to keep."""
    if device == "cpu":
        return out / "baselines" / "profiles" / "cpu.json"
    asked = subprocess.run(
        (sys.executable, "-c", WHERE, device), cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    if asked.returncode:
        sys.exit(f"ERROR: {(asked.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return ROOT / "baselines" / "profiles" / asked.stdout.strip().splitlines()[-1]


def _environment() -> dict[str, str]:
    """Plugins by name, since this one may be installed here or not."""
    paths = os.pathsep.join(filter(None, (str(ROOT), str(SITE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _install() -> None:
    """What is missing; ends with one line where that is more than the wheels have."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"ERROR: this Python lacks {', '.join(missing)}: install them first")
    if importlib.util.find_spec("rustworkx") is None and not (SITE / "rustworkx").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(WHEELS), "--target", str(SITE))
        subprocess.run((*pip, "rustworkx"), check=True)


def _run(piece: Piece, out: Path, seconds: float) -> int:
    """Run a piece for so long at most; its exit code, 124 where it was cut off."""
    started = time.monotonic()
    with (out / f"{piece.name}.log").open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                piece.command, cwd=ROOT, env=_environment(), stdout=log, stderr=log, timeout=seconds, check=False
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    print(f"{piece.name}: exit code {code}, {time.monotonic() - started:.0f} s", flush=True)
    return code


def _read(out: Path) -> dict[str, int]:
    path = out / "state.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
