"""What becomes of a script: eager mode and magis run the same loop, through the public API alone, side by side.

Everything that a user can see after a step is compared bit by bit: the loss, parameters, buffers, attributes of
modules, gradients (where the loop itself updates), the optimizer's state, the generator and the batch that was passed.

A plan that runs in parts adds up in another order. There, a number may be off by `share` (1%) of its tensor's largest,
and by `SLACK` times what eager itself moves it by when its backwards round otherwise (`tests/fuzz/rounding.py`): an
update by Adam or by signs is as large for a gradient of rounding errors, zero but for them, as for any other.
"""

from __future__ import annotations

import copy
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

import magis
from magis.capture import OptimizerSpec
from magis.capture.workload import as_batch
from magis.frontends.plan_files import read_plan
from magis.frontends.planned import subject_now
from magis.results import Case
from tests.fuzz.adversary import write_adversarial_plan
from tests.fuzz.rounding import OtherRounding
from tests.fuzz.script import Script, namespace

__all__ = ["Outcome", "eager", "in_case", "in_loop", "trains"]

BUDGET = 20
LEANEST = {"latency_ratio": 4.0}
"""A limit that there is always a plan for, and that makes the search recompute."""
NO_PLAN = "no plan found"
ROUNDINGS = 4
"""Pairs of eager runs whose rounding errors are each other's opposites."""
SLACK = 2.0
FAILS = "eager mode itself fails with other random numbers"


@dataclass(frozen=True)
class Outcome:
    """What became of a script: "equal", "refused" (with the line), "wrong" (with what differs) or "traceback"."""

    kind: str
    detail: str = ""
    recomputed: int = 0
    swapped: int = 0
    parts: bool = False
    early: bool = False
    """Whether the weight update is part of the step."""
    smaller: bool = False

    @property
    def cause(self) -> str:
        """What scripts that fail in the same way have in common: the detail without names and numbers."""
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", self.detail)
        text = re.sub(r"script\.py:\d+|0x[0-9a-f]+", "script.py", text)
        return f"{self.kind}: {re.sub(r'-?[0-9][0-9.,e+-]*', 'N', text)}"

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "traceback", "died", "hung")


Seen: TypeAlias = Mapping[str, Any]
"""All that a user can see after a step, by name."""


class Loop:
    """A script that runs with one kind of step, noting what is seen after each."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.found = namespace(script)
        self.seen: list[Seen] = []

    def run(self, one: Callable[[Any, Any], Tensor]) -> list[Seen]:
        """Run the events; `one(inputs, targets)` is the step."""

        def step(seed: int, *_unused: object, **how: Any) -> Tensor:
            with torch.random.fork_rng(devices=[]):  # of the loader: the step's numbers go on where the last left off
                inputs, targets = self.found["batch"](seed, **how)
            loss = one(inputs, targets)
            self.seen.append(self.look(loss, (inputs, targets)))
            return loss

        self.found["step"] = step
        for number, event in enumerate(self.script.events):
            exec(compile(event, f"event {number}", "exec"), self.found)
        return self.seen

    def look(self, loss: Tensor, batch: Any) -> Seen:
        model, optimizer = self.found["model"], self.found["optimizer"]
        found: dict[str, Any] = {"loss": loss.detach().clone(), "generator": torch.get_rng_state()}
        for kind, named in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                found[f"{kind} {name}"] = tensor.detach().clone()
                if optimizer is None or self.found.get("KEEPS_GRADIENTS"):
                    found[f"gradient {name}"] = None if tensor.grad is None else tensor.grad.clone()
        for name, module in model.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, (bool, int, float, str)):
                    found[f"attribute {name}.{key}"] = value
                elif isinstance(value, Tensor):
                    found[f"attribute {name}.{key}"] = value.detach().clone()
        if optimizer is not None:
            found["state"] = copy.deepcopy(optimizer.state_dict())
        for number, tensor in enumerate((*batch[0], *batch[1])):
            found[f"batch {number}"] = tensor.clone()
        return found


def eager(script: Script, rounding: AbstractContextManager[object] | None = None) -> list[Seen]:
    """The loop as PyTorch runs it, its backwards within `rounding`."""
    loop = Loop(script)
    found = loop.found

    def one(inputs: Any, targets: Any) -> Tensor:
        if found["optimizer"] is not None:
            found["optimizer"].zero_grad(set_to_none=True)
        kind = getattr(torch, script.autocast or "bfloat16")
        with torch.autocast("cpu", dtype=kind, enabled=bool(script.autocast)):
            loss: Tensor = found["loss_fn"](found["model"](*inputs), *targets)
        with rounding or nullcontext():
            loss.backward()
        if found["optimizer"] is not None:
            found["optimizer"].step()
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loop.run(one)


def rounded_otherwise(script: Script) -> list[list[Seen]]:
    """The loop as PyTorch runs it where its backwards round in other ways."""
    return [eager(script, OtherRounding(seed, sign)) for seed in range(ROUNDINGS) for sign in (1, -1)]


def trains(script: Script) -> list[Seen] | None:
    """What is seen of the eager loop; None for one that fails, that is not the same twice, or all of whose losses are
    no numbers: nothing could be compared with it."""
    try:
        first, second = eager(script), eager(script)
    except Exception:  # noqa: BLE001 (of any kind: the script is at fault)
        return None
    if not first or different(first, second) or not any(seen["loss"].isfinite().all() for seen in first):
        return None
    return first


def in_loop(script: Script, expected: list[Seen], *, budget: int = BUDGET, plan_seed: int | None = None) -> Outcome:
    """The loop with `magis.optimize`, compared with the eager one. `plan_seed`: with that random plan."""
    planned: list[magis.OptimizedStep] = []
    facts: list[Outcome] = []
    loop = Loop(script)

    def one(inputs: Any, targets: Any) -> Tensor:
        if not planned:
            step = _optimized(script, loop.found, (inputs, targets), budget)
            if plan_seed is not None:
                step, fact = _replanned(script, loop.found, (inputs, targets), step, plan_seed)
                facts.append(fact)
            planned.append(step)
        loss = planned[0](inputs, targets)
        facts.append(_facts(planned[0].report()))
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seen = loop.run(one)
        except magis.MagisError as error:
            if planned and NO_PLAN in str(error):  # for another batch or mode, under a limit that nothing keeps there
                return in_loop(
                    replace(script, limit=tuple(LEANEST.items())), expected, budget=budget, plan_seed=plan_seed
                )
            return Outcome("refused", str(error))
        except Exception as error:  # noqa: BLE001 (any is a finding)
            return Outcome("traceback", where(error))
    done = replace(
        facts[-1],
        recomputed=max(fact.recomputed for fact in facts),
        swapped=max(fact.swapped for fact in facts),
        parts=any(fact.parts for fact in facts),
        smaller=any(fact.smaller for fact in facts),
    )
    share = 0.03 if script.autocast else 0.01  # autocast computes in few bits, whatever the type of what is seen
    difference = different(expected, seen, roughly=share if done.parts else 0.0)
    if difference and done.parts:
        difference = different(expected, seen, roughly=share, others=rounded_otherwise(script))
    return replace(done, kind="wrong", detail=difference) if difference else done


def _optimized(script: Script, found: Mapping[str, Any], batch: Any, budget: int) -> magis.OptimizedStep:
    """The step under the script's limit or, where there is no plan for that, the leanest one."""
    cast = {"autocast": getattr(torch, script.autocast)} if script.autocast else {}
    model, state = found["model"], torch.get_rng_state()
    limits: tuple[Mapping[str, float], ...] = (dict(script.limit), LEANEST)
    for limit in limits:
        try:
            return magis.optimize(
                model, batch, found["loss_fn"], found["optimizer"], budget=budget, **limit, **cast,  # type: ignore[arg-type]
            )  # fmt: skip
        except magis.MagisError as error:
            if NO_PLAN not in str(error) or limit is LEANEST:
                raise
        torch.set_rng_state(state)
    raise AssertionError("unreachable")


def _replanned(
    script: Script, found: Mapping[str, Any], batch: Any, step: magis.OptimizedStep, seed: int
) -> tuple[magis.OptimizedStep, Outcome]:
    """The step with a random plan in place of its own."""
    state = torch.get_rng_state()
    rule = step._entries[-1].plan.rule
    cast = getattr(torch, script.autocast) if script.autocast else None
    subject = subject_now(found["model"], found["loss_fn"], as_batch(batch), rule, "cpu", cast)
    assert subject.conformance
    graph = subject.captured.graph
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.txt"
        step.save(path)
        redos, swaps = write_adversarial_plan(path, graph, seed)
        limit: dict[str, Any] = dict(read_plan(path).limit)  # a plan is taken up for the limit that it was made for
        again = magis.optimize(
            found["model"], batch, found["loss_fn"], found["optimizer"], plan=path, autocast=cast, **limit
        )
    torch.set_rng_state(state)
    return again, Outcome("equal", recomputed=redos, swapped=swaps)


def _facts(report: Any) -> Outcome:
    return Outcome(
        "equal",
        recomputed=report.recomputed_ops,
        swapped=report.swapped_bytes,
        parts=report.fission not in ("", "as saved"),  # saved ones are random here, without loops
        early=report.update == "part of the step",
        smaller=report.planned_bytes < report.original_bytes,
    )


def in_case(script: Script, *, budget: int = BUDGET) -> Outcome:
    """The first step as a case of the gate: its own verdict on numbers, and simulated bytes against measured ones."""
    kind = next((name for name in ("adamw", "adam") if f"{name}(" in " ".join(script.optimizer).lower()), "sgd")

    def make(seed: int) -> magis.Workload:
        found = namespace(script)
        inputs, targets = found["batch"](seed)
        rule = OptimizerSpec(kind, lr=1e-2)
        return magis.Workload("script", found["model"], inputs, targets, found["loss_fn"], rule)

    case = Case("script", "magis", "cpu", "small", budget=budget, timing_rounds=1, **dict(script.limit))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = magis.run_case(case, make=make, rough=True)
        except magis.MagisError as error:
            return Outcome("refused", str(error))
        except Exception as error:  # noqa: BLE001 (any is a finding)
            return Outcome("refused", FAILS) if _is_of_eager(error) else Outcome("traceback", where(error))
    search = result.search
    done = Outcome(
        "equal",
        recomputed=search.recomputed_ops,
        swapped=search.swapped_bytes,
        parts=bool(search.fission),
        early=True,
        smaller=result.optimized.simulated.peak_bytes < result.original.simulated.peak_bytes,
    )
    if result.numbers not in ("bit-identical", "within tolerance"):
        return replace(done, kind="wrong", detail=f"case: {result.numbers}")
    for name, step in (("original", result.original), ("optimized", result.optimized)):
        if step.measured is None:
            return replace(done, kind="wrong", detail=f"case: the {name} did not run: {result.note}")
        off = step.measured.peak_bytes - step.simulated.peak_bytes
        if off:
            return replace(done, kind="wrong", detail=f"bytes of the {name}: measured {off:+} of simulated")
    return done


def _is_of_eager(error: BaseException) -> bool:
    """Whether it is eager's own step that fails: of a script that draws an index, say, by other random numbers."""
    return any(
        f.name == "_forward_and_loss" and f.filename.endswith("/runtime/steps.py")
        for f in traceback.extract_tb(error.__traceback__)
    )


def where(error: BaseException) -> str:
    """An exception and the innermost function of magis that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/magis/" in f.filename]
    place = f" in {Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}{place}: {text[:200]}"


# --- comparing --------------------------------------------------------------------------------------------------------


def different(theirs: list[Seen], ours: list[Seen], *, roughly: float = 0.0, others: Sequence[list[Seen]] = ()) -> str:
    """What differs first, in words; empty if nothing does. `roughly`: by more than this share, and only numbers;
    `others`: loops as good as theirs, whose distance from it is allowed, too."""
    if len(theirs) != len(ours):
        return f"{len(ours)} steps, eager has {len(theirs)}"
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for name in [*their, *(name for name in our if name not in their)]:
            if name not in our or name not in their:
                side = "eager" if name in their else "ours"
                return f"{_kind(name)} differs: {name} of step {number} is only in {side}"
            if roughly and name == "state":
                continue
            found = _unlike(their[name], our[name], roughly, [other[number][name] for other in others])
            if found:
                return f"{_kind(name)} differs: {name} of step {number}: {found}"
    return ""


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def _unlike(their: Any, our: Any, roughly: float, others: Sequence[Any] = ()) -> str:
    if isinstance(their, Tensor) and isinstance(our, Tensor):
        return _tensors(their, our, roughly, others)
    if isinstance(their, dict) and isinstance(our, dict):
        if list(their) != list(our):
            return f"keys {list(their)} became {list(our)}"
        parts = ((f"[{key!r}]", _unlike(value, our[key], roughly)) for key, value in their.items())
    elif isinstance(their, (list, tuple)) and isinstance(our, (list, tuple)):
        if len(their) != len(our):
            return f"length {len(their)} became {len(our)}"
        parts = ((f"[{at}]", _unlike(a, b, roughly)) for at, (a, b) in enumerate(zip(their, our, strict=True)))
    else:
        same = type(their) is type(our) and (their == our or repr(their) == repr(our))  # no number is like itself
        return "" if same else f"{their!r} became {our!r}"
    return next((f"{place} {found}" for place, found in parts if found), "")


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides; those over a single element say nothing."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _tensors(their: Tensor, our: Tensor, roughly: float, others: Sequence[Tensor] = ()) -> str:
    looks = [(t.shape, t.dtype, _steps(t), t.requires_grad) for t in (their, our)]
    if looks[0] != looks[1]:
        return f"{looks[0]} became {looks[1]}"
    if their.numel() == 0:
        return ""
    wide = torch.complex128 if their.is_complex() else torch.float64
    if not their.is_floating_point() and not their.is_complex():
        return "" if torch.equal(their, our) else "other integers"
    a, b, *rest = (each.resolve_conj().resolve_neg().to(wide) for each in (their, our, *others))
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return ""
    error = (a - b).abs()[~same]
    scale = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 1.0
    share = 3e-2 if their.dtype in (torch.bfloat16, torch.float16) else roughly
    allowed = torch.full_like(error, share * max(scale, 1e-2))
    if rest:
        allowed += SLACK * torch.stack([(a - other).abs()[~same] for other in rest]).amax(0)
    if roughly and (error <= allowed).all():
        return ""
    return f"off by up to {error.max().item():.3g} of {scale:.3g}"
