"""The committed baselines on processors other than those that made them: tensor bytes are gated there, and only they.

An environment variable makes torch take the kernels of an older processor, oneDNN's included; other kernels need other
scratch and give other numbers. The plan, and with it every tensor, must be the committed one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = "gpt_neo"
RUN = (
    f"--magis-models={MODEL}",
    "--magis-memory-ratios=0.8",
    "--magis-strategies=magis",
    "--magis-device=cpu",
    "--magis-csv-full",
)
MACHINES = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
# latency is not gated here, and old kernels are slow: one pair is enough
CONFTEST = """
def pytest_sessionstart():
    from magis.cases import run_case as cases
    from magis.runtime import timing

    cases.TIMING_ROUNDS = cases.ROUNDS_WHOLE = 1
    cases.WARM_UP = 0
    timing.DECIDING = (1, 0.0)
"""


def has_avx2():
    path = Path("/proc/cpuinfo")
    return path.exists() and " avx2 " in path.read_text()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instruction sets of x86-64 processors")
@pytest.mark.skipif(not has_avx2(), reason="the processor has no AVX2")
def test_committed_baselines_hold_on_older_processors(gate, repository):
    gate.use_real_core()
    (gate.root / "conftest.py").write_text(CONFTEST)
    committed = repository / "baselines"
    text = (committed / "cpu" / f"{MODEL}.json").read_text()
    baseline = json.loads(text)["configurations"]["small"]["cases"]["magis-mem0.8"]
    shown = at_once(gate, *RUN, f"--magis-baselines={committed}")

    for name, (code, output) in shown.items():
        assert code == 0, output
        (row,) = gate.rows(f"{name}.csv")
        isa = MACHINES[name]["ONEDNN_MAX_CPU_ISA"]
        assert f"instruction set={name}, oneDNN=MAX_CPU_ISA={isa}," in row["device identity"]
        assert row["device identity"] not in baseline["measured"]
        assert (row["verdict"], row["numbers"], row["feasible"]) == ("pass", "bit-identical", "True")
        # as measured, and not only as planned
        assert row["opt-is-prof-result"] == row["ori-is-prof-result"] == "True"
        assert int(row["opt tensor bytes"]) == baseline["optimized_tensor_bytes"]
        assert int(row["ori tensor bytes"]) == baseline["original_tensor_bytes"]
        assert row["graph digest"] == baseline["graph"]
        note = (
            f"only tensor bytes are gated: the baseline has no measurement of this device ({row['device identity']}); "
            "--magis-update=new adds one"
        )
        assert note in row["note"]
        assert f"{MODEL}[magis-mem0.8]: {note}" in output.splitlines()
    assert (committed / "cpu" / f"{MODEL}.json").read_text() == text


def at_once(gate, *args):
    """Exit code and output of the run on every machine; side by side, since most of a run uses one core."""
    processes = {}
    for name, variables in MACHINES.items():
        command = [sys.executable, "-m", "pytest", "-p", "pytest_magis.plugin", "-p", "no:cacheprovider", *args]
        processes[name] = subprocess.Popen(
            [*command, "--rootdir=.", f"--magis-csv={name}.csv"],
            cwd=gate.root,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        return {
            name: (process.wait(), output)
            for name, process in processes.items()
            for output in [process.communicate(timeout=300)[0]]
        }
    finally:
        for process in processes.values():
            process.kill()
