"""Records an operator profile: every distinct operator of some models, measured on the device at hand."""

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
from magis.fission.candidates import most_parts
from magis.fission.expand import expand
from magis.fission.loss_suffix import pieces
from magis.fission.region import Region
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
from magis.search.fission_pareto import numbers_of_parts
from magis.simulate.compiled_problem import reusable, take_over_form
from magis.strategies.single_device import local

# Every distinct operator that the plans of a model can hold, as signatures: what a profile must know.


def signatures_of_model(subject: Subject, *, parts: bool = True) -> tuple[str, ...]:
    """The signatures in the order in which they are met: of the step as eager runs it and under checkpointing, of the
    forms that the search works on, and with `parts` at all sizes that fission asks for."""
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
    """Signatures of operators as they stand, as they are recomputed, and as they take over the memory of an input."""
    for form in (graph, redo_graph(graph)):
        yield from signatures_of(form)
        for level in _levels(form):
            for op in level.ops:
                for victim in reusable(level, op):
                    yield signature(take_over_form(op, victim), level.values)


def _levels(graph: Graph) -> Iterator[Graph]:
    """The graph and the bodies of its loops."""
    yield graph
    for op in graph.ops:
        if op.body is not None:
            yield from _levels(op.body.graph)


def _loops(graph: Graph) -> Iterator[Graph]:
    """The graph with each piece that may run in parts as a loop, in all numbers of parts."""
    for piece in pieces(graph):
        for parts in numbers_of_parts(most_parts(piece.cuts)):
            try:
                yield expand(graph, Region(piece.cuts, parts), in_place=True)
            except VerifyError:  # no legal region, or a kernel refuses the size of a part: no plan has it
                break


GPU_SHARE = 4
"""A batch takes at most this part (the reciprocal) of a GPU's free memory."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Recording:
    """Counts of a recording: operators in the file, those asked for, and those of them that are not measured."""

    operators: int
    wanted: int
    missing: tuple[str, ...]
    """Signatures that were refused, too large, or not reached before the time was up."""
    in_time: bool
    """True if every operator had its turn."""


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
    """Measure every operator of the models that the profile at `path` lacks, and add it there.

    The file is replaced after every batch, so that a recording that is cut off goes on where it was. `dtypes` are data
    types (None: each model's own), `parts` whether the sizes of fission are measured too, `seconds` a cap. Raises
    ProfileError if the file is of another device or torch version, or corrupt; it stays as it is.
    """
    started = time.perf_counter()
    every = tuple(dtypes)
    rounding = _rounding_of_products(every, device, preset)
    effort = effort or ProfilingEffort(batch_bytes=_batch_bytes(device))
    identity = recording_identity(device, rounding)
    profile = _opened(path, identity)
    if not path.exists():
        save(profile, path)  # a place that cannot be written is found out before the work
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
    """Return the rounding of products: "tf32", or "" where they are in full. UsageError for what cannot be recorded."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", hint=f"use one of {', '.join(PRESETS)}")
    for dtype in dtypes:
        if dtype is not None:
            check_dtype(dtype, device)
    if "tf32" in dtypes and len(set(dtypes)) > 1:
        raise UsageError("tf32 beside other data types", hint="record it by itself: it has a file of its own")
    return "tf32" if "tf32" in dtypes else ""


def _added(path: Path, found: Profile) -> Profile:
    """The file with these entries, and those that others put there meanwhile: one recording at a time replaces it."""
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


def _opened(path: Path, identity: dict[str, str]) -> Profile:
    if not path.exists():
        return Profile(identity)
    known = load(path)
    merge(known, Profile(identity))  # which refuses another device
    return known


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
    """The link's speed, and what a copy takes besides; each is measured once in a file's life."""
    if device == "cpu":
        return 0, 0
    where = torch.device(device)
    return profile.link or link_speed(where), profile.copy_ns or copy_overhead(where)
