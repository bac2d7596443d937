"""A stand-in for `magis.api`, loaded into inner runs as their conftest: it makes results up, quickly and without torch.

Figures depend on the case alone, so that runs agree. `fake.json` in the root directory changes them: it maps a case's
name (or "*") to changes of `FIGURES`, plus "raise" (a message of magis.errors.UsageError), "crash", "interrupt", or
"fail_times" (raise RuntimeError that often, then succeed; counted in a file, whatever process runs it). `held` maps
modules to bytes: with it, results say what is held at the peak and, where they are asked for, have time lines.
"""

import json
import os
import sys
import zlib
from dataclasses import replace

import pytest

from magis.errors import UsageError
from magis.results import (
    CaseResult,
    FrontPoint,
    Memory,
    ModuleBytes,
    ParetoFront,
    Peak,
    RatioInterval,
    SearchStats,
    Span,
    StepFigures,
    TensorLives,
    Timelines,
)
from magis.units import in_one_word

DEVICES = ("cpu", "sim:rtx3090")

FIGURES = {
    "opt_tensor": 1.0,  # factors on what the case would have
    "opt_peak": 1.0,
    "ori_tensor": 1.0,
    "latency": 1.02,
    "milliseconds": 10.0,  # of the original
    "constants": "1",  # of simulated devices
    "half_interval": 0.01,
    "simulator_off": 0,  # bytes
    "numbers": "bit-identical",
    "identity": "avx512",
    "feasible": True,
    "stopped": False,
    "note": "",
    "graph": "g1",
    "planner": "",
    "lower_bound": 0.3,  # share of the original's peak
    "workspaces": {"aten::mm(4x4)": 512},
    "ori_reserved": 0,  # factors on the peak; 0: nothing is known, as on a CPU
    "opt_reserved": 0,
    "says": [],  # lines of progress
    "shout": "",  # printed to stdout while the case runs
    "held": {},
}


def pytest_magis_devices():
    return DEVICES


def label_of(case):
    if case.memory_limit is not None:
        return f"{case.strategy}-mem{in_one_word(case.memory_limit)}"
    if case.memory_ratio is not None:
        suffix = "-reserved" if case.memory_limit_of == "reserved" else ""
        return f"{case.strategy}-mem{case.memory_ratio:.12g}{suffix}"
    return case.strategy if case.latency_ratio is None else f"{case.strategy}-lat{case.latency_ratio:.12g}"


def figures(root, name):
    path = root / "fake.json"
    changes = json.loads(path.read_text()) if path.exists() else {}
    return FIGURES | changes.get("*", {}) | changes.get(name, {})


@pytest.hookimpl(tryfirst=True)
def pytest_magis_run_case(case, config, planning_workspaces, expected_graph, progress, timelines):
    root = config.rootpath
    name = f"{case.model}[{label_of(case)}]"
    with (root / "calls.txt").open("a") as log:
        log.write(json.dumps([name, os.getpid(), planning_workspaces, expected_graph]) + "\n")
    figure = figures(root, name)
    if "raise" in figure:
        raise UsageError(figure["raise"])
    if "crash" in figure:
        raise RuntimeError(figure["crash"])
    if "interrupt" in figure:
        raise KeyboardInterrupt
    calls = [json.loads(line)[0] for line in (root / "calls.txt").read_text().splitlines()]
    if calls.count(name) <= figure.get("fail_times", 0):
        raise RuntimeError("not yet")
    for text in figure["says"]:
        progress(text)
    if figure["shout"]:
        sys.stdout.write(figure["shout"])
    result = make_result(case, figure)
    return told(result, figure["held"], timelines=timelines) if figure["held"] else result


def told(result, held, *, timelines):
    rows = tuple(ModuleBytes("activation", module, nbytes, 1, "net.py:7") for module, nbytes in held.items())
    module = rows[0].module
    peak = Peak("aten.mm.default", module, "forward", "net.py:7", rows)
    level = result.original.simulated.peak_bytes
    spans = tuple(
        Span("aten.mm.default", module, "forward", "net.py:7", float(at), 1.0, level - abs(at - 900), again=at > 1700)
        for at in range(1800)
    )
    copy = Span("magis.store", module, "forward", "", 2.0, 5.0, level, "to host")
    return replace(
        result,
        original=replace(result.original, at_peak=peak),
        optimized=replace(result.optimized, at_peak=peak),
        search=replace(result.search, changes=rows),
        timelines=Timelines(spans, (*spans, copy), *2 * (lives_of(rows, level),)) if timelines else None,
    )


def lives_of(rows, level):
    """All rows are in memory throughout; scratch fills up what 1800 calls of 1 ms need."""
    words = ("aten.mm.default", "forward", "net.py:7", "activation", "float32[4]", *(row.module for row in rows))
    end, held = 1800, sum(row.nbytes for row in rows)
    fill = {name: len(rows) * (word,) for name, word in (("label", 0), ("line", 2), ("kind", 3), ("shape", 4))}
    return TensorLives(
        words,
        ((0, 5, 1, 2, 0), (0, 5, 1, 2, 1)),
        run=tuple(int(at > 1700) for at in range(end)),
        ends=tuple(1_000_000 * (at + 1) for at in range(end)),
        scratch=tuple(level - abs(at - 900) - held for at in range(end)),
        born=len(rows) * (0,),
        dies=len(rows) * (end - 1,),
        nbytes=tuple(row.nbytes for row in rows),
        module=tuple(range(5, 5 + len(rows))),
        **fill,
    )


def make_result(case, figure):
    base = 1_000_000 + 4 * (zlib.crc32(case.model.encode()) % 100_000)
    original = Memory(int(base * figure["ori_tensor"]) // 4 * 4, int(base * figure["ori_tensor"]) // 4 * 4 + 4096)
    held = int(original.peak_bytes * figure["ori_reserved"]) or None
    limited = held or original.peak_bytes if case.memory_limit_of == "reserved" else original.peak_bytes
    limit = case.memory_limit if case.memory_ratio is None else int(case.memory_ratio * limited)
    eager = case.strategy == "eager"
    share = {"eager": 1.0, "checkpoint": 0.7}.get(case.strategy, 0.99 * (case.memory_ratio or 0.9))
    tensors = original.tensor_bytes if eager else int(share * base * figure["opt_tensor"]) // 4 * 4
    optimized = Memory(tensors, original.peak_bytes if eager else int((tensors + 512) * figure["opt_peak"]))
    real = not case.device.startswith("sim:")
    latency = 1.0 if eager else figure["latency"]
    milliseconds = figure["milliseconds"]
    identity = {"instruction set": figure["identity"], "threads": "2", "torch": "2.13.0"}
    return CaseResult(
        case=case,
        dtype=case.dtype or "float32",
        identity=identity if real else {"device": case.device, "constants": figure["constants"]},
        original=replace(step(original, milliseconds, real, 0), reserved_bytes=held),
        optimized=replace(step(original, milliseconds, real, 0), reserved_bytes=held)
        if eager
        else replace(
            step(optimized, milliseconds * latency, real, figure["simulator_off"]),
            reserved_bytes=int(optimized.peak_bytes * figure["opt_reserved"]) or None,
        ),
        ratio=interval(latency, figure["half_interval"]) if real and not eager else None,
        weight_bytes=base // 8 * 4,
        persistent_bytes=base // 4,
        memory_limit_bytes=limit,
        latency_limit_ms=None if case.latency_ratio is None else 10 * case.latency_ratio,
        device_memory_bytes=8 * 2**30,
        lower_bound_bytes=int(figure["lower_bound"] * original.peak_bytes),
        numbers=figure["numbers"] if real else "not run",
        graph_digest=figure["graph"],
        planner="" if eager else figure["planner"],
        note=figure["note"],
        search=SearchStats(0.5, 0 if eager else 321, figure["stopped"], figure["feasible"], 0 if eager else 7),
        planning_workspaces={} if eager else figure["workspaces"],
    )


def step(memory, milliseconds, real, off):
    simulated = Memory(memory.tensor_bytes + off, memory.peak_bytes + off)
    if not real:
        return StepFigures(simulated, milliseconds)
    middle = 1.1 * milliseconds
    return StepFigures(simulated, milliseconds, memory, (middle - 0.1, middle, middle + 0.1))


def interval(ratio, half):
    return RatioInterval(ratio, ratio - half, ratio + half, 15)


def pytest_magis_front(case, config):
    changes = figures(config.rootpath, f"{case.model}[pareto]")
    if "raise" in changes:
        raise UsageError(changes["raise"])
    points = (FrontPoint(500, 11.0, 3, 0, ""), FrontPoint(900, 10.0, 0, 0, ""))
    eager = FrontPoint(1000, 10.0, 0, 0, "")
    dtype = case.dtype or "float32"
    return ParetoFront(
        case.model, case.device, case.preset, dtype, case.seed, eager, 200, points, case.budget or 7, 0.1
    )
