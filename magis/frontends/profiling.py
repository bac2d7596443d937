"""Record an operator profile: time every distinct operator of some models on the device at hand."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from magis.cost.operator_latency import signatures_of
from magis.cost.profile_store import Entry, Profile, load, merge, save
from magis.cost.signature import signature
from magis.dtypes import check_dtype
from magis.errors import UsageError, VerifyError
from magis.fission.candidates import regions_in_parts
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.graph import Graph
from magis.models.model_specs import PRESETS
from magis.planner.bench import Bench, products_of
from magis.planner.device_profiles import recording_identity
from magis.planner.subject import Subject
from magis.planner.traced_model import redo_graph
from magis.results import Case
from magis.runtime.measure import free_device_memory
from magis.runtime.profiler import (
    CallBatch,
    EventWatch,
    ProfilingEffort,
    Wall,
    batches,
    copy_overhead,
    cuda_workspace,
    link_speed,
    record,
    schemas,
)
from magis.simulate.compiled_problem import reusable, take_over_form
from magis.strategies.single_device import local

# Signatures of every distinct operator that plans of a model can contain: a profile must have their times.


def signatures_of_model(subject: Subject, *, parts: bool = True) -> tuple[str, ...]:
    """Return the distinct signatures of all operators in plans of a model, in program order. They are those of eager's
    step, of the step under checkpointing, of plans from the search, and with `parts` of all sizes of parts that fission
    may choose."""
    steps = [subject.captured]
    if subject.blocks:
        steps.append(subject.captured_as(local("checkpoint", subject.kind))[0])
    graphs = [graph for step in steps for graph in (step.original.graph, step.graph)]
    found = [key for graph in graphs for key in signatures_of(graph)]
    for graph in (subject.normal, subject.aggregated):
        found += _signatures_in_plans(graph)
    for graph in _loops(subject.aggregated) if parts else ():
        found += _signatures_in_plans(graph)
    return tuple(dict.fromkeys(found))


def _signatures_in_plans(graph: Graph) -> Iterator[str]:
    """Yield signatures of the operators as they are, when recomputed, and when their output reuses an input's
    memory."""
    for form in (graph, redo_graph(graph)):
        yield from signatures_of(form)
        for level in _levels(form):
            for op in level.ops:
                for victim in reusable(level, op):
                    yield signature(take_over_form(op, victim), level.values)


def _levels(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the bodies of its loops."""
    yield graph
    for op in graph.ops:
        if op.body is not None:
            yield from _levels(op.body.graph)


def _loops(graph: Graph) -> Iterator[Graph]:
    """Yield the graph with each region that may run in parts as a loop, for all numbers of parts."""
    for piece in pieces(graph):
        for region in regions_in_parts(piece.cuts):
            try:
                yield expand(graph, region, in_place=True)
            except VerifyError:  # no legal region, or a kernel refuses the size of a part: no plan has it
                break


GPU_SHARE = 4
"""Reciprocal of the largest share of a GPU's free memory that one batch of operators takes."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Recording:
    """Counts of a recording: operators in the profile, operators asked for, and those that were not measured."""

    operators: int
    wanted: int
    missing: tuple[str, ...]
    """Signatures that failed, are too large, or were not reached in time."""
    in_time: bool
    """True if no operator was left out for lack of time."""


def record_profile(
    path: Path,
    models: Iterable[str],
    *,
    device: str,
    preset: str,
    dtypes: Iterable[str | None] = (None,),
    parts: bool = True,
    effort: ProfilingEffort | None = None,
    seconds: float | None = None,
    progress: Progress = lambda _text: None,
) -> Recording:
    """Measure every operator of the models that the profile at `path` lacks, and add the times to the file.

    The file is written after every batch, so that an interrupted recording can be resumed. `dtypes` are names of dtypes
    (None: each model's own), `parts` adds the sizes of fission, `seconds` is a time limit. Raises ProfileError if the
    file is corrupt or of another device or torch version, and leaves the file unchanged.
    """
    started = time.perf_counter()
    every = tuple(dtypes)
    rounding = _rounding_of_products(every, device, preset)
    effort = effort or ProfilingEffort(batch_bytes=_batch_bytes(device))
    identity = recording_identity(device, rounding)
    profile = Profile(identity)
    if path.exists():
        profile = load(path)
        merge(profile, Profile(identity))  # raises for another device
    else:
        save(profile, path)  # fail before the work if the path is not writable
    wanted: dict[str, None] = {}
    over = False
    for model, keys in _asked(models, every, device, preset, parts, progress):
        lacking = [key for key in keys if key not in wanted and key not in profile.entries]
        wanted.update(dict.fromkeys(keys))
        for number, batch in enumerate(batches(lacking, effort.batch_bytes)):
            if seconds is not None and time.perf_counter() - started > seconds:
                over = True
                break
            progress(f"{model}: batch {number + 1}, {len(profile.entries)} operators known")
            with products_of(rounding):
                found = _measure_batch(batch, effort, device)
            profile = _added(path, Profile(identity, found, schemas(found), *_copies(profile, device)))
        if over:
            break
    missing = tuple(key for key in wanted if key not in profile.entries)
    return Recording(len(profile.entries), len(wanted), missing, not over)


def _rounding_of_products(dtypes: tuple[str | None, ...], device: str, preset: str) -> str:
    """Return "tf32" if matrix products are rounded to it, else "". Raises UsageError for an unknown preset or dtype."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", hint=f"use one of {', '.join(PRESETS)}")
    for dtype in dtypes:
        if dtype is not None:
            check_dtype(dtype, device)
    if "tf32" in dtypes and len(set(dtypes)) > 1:
        raise UsageError("tf32 beside other data types", hint="record it by itself: it has a file of its own")
    return "tf32" if "tf32" in dtypes else ""


def _added(path: Path, found: Profile) -> Profile:
    """Merge entries into the profile file under a lock, and return the profile."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        merged = merge(load(path), found) if path.exists() else found
        save(merged, path)
    finally:
        os.close(folder)
    return merged


def _asked(
    models: Iterable[str], dtypes: Iterable[str | None], device: str, preset: str, parts: bool, progress: Progress
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for model in models:
        for dtype in dtypes:
            progress(f"{model}: capturing")
            subject = Bench().subject(Case(model, "magis", device, preset, dtype))
            yield model, signatures_of_model(subject, parts=parts)


def _batch_bytes(device: str) -> int:
    if device == "cpu":
        return ProfilingEffort.batch_bytes
    return max(ProfilingEffort.batch_bytes, free_device_memory(device) // GPU_SHARE)


def _measure_batch(batch: CallBatch, effort: ProfilingEffort, device: str) -> dict[str, Entry]:
    where = torch.device(device)
    if device == "cpu":
        return record(batch, effort, where, Wall())
    return record(batch, effort, where, EventWatch(torch.cuda), lambda key: cuda_workspace(key, where))


def _copies(profile: Profile, device: str) -> tuple[int, int]:
    """Return the link's speed and the overhead of a copy, measured if the profile lacks them; zeros for the CPU."""
    if device == "cpu":
        return 0, 0
    where = torch.device(device)
    return profile.link or link_speed(where), profile.copy_ns or copy_overhead(where)
