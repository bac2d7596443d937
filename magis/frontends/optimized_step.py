"""A planned training step on a user's own module and optimizer, as `magis.optimize` returns it."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture import OptimizerSpec
from magis.capture.one_by_one import OneByOneError
from magis.capture.optimizer_rule import Update, fingerprint, update_of, why_apart
from magis.capture.workload import Batch, as_batch, own_loss, roots_of, with_keywords, with_loss, with_targets
from magis.errors import CaptureError, MagisError, UsageError
from magis.frontends.audits import Audits, step_difference
from magis.frontends.bound_plan import BoundPlan
from magis.frontends.branching import constants_of, contents_kept, outline
from magis.frontends.compiled_plans import channels_last, has_pictures
from magis.frontends.kept_steps import KEPT, KINDS, Choice, KeptStep, KeptSteps
from magis.frontends.limits import Limits, PlanReport
from magis.frontends.number_inputs import Given
from magis.frontends.optimizer_state import (
    MemoryGuard,
    adopted,
    check_hooks,
    check_mode,
    check_optimizer,
    trained_parameters,
)
from magis.frontends.own_state import OwnCodes, OwnState
from magis.frontends.plan_files import SavedPlan, read_plan, write_plan
from magis.frontends.planned import Planned, Together, planned, subject_now
from magis.frontends.undoing import PartialUpdate, raise_as_eager, raises_again, undo_of
from magis.ops.own_updates import OWN_UPDATES
from magis.ops.python_objects import DATA, follow
from magis.planner.plans import Decisions
from magis.planner.search_progress import planning_shown
from magis.rewrite.moved_state import moved_state
from magis.runtime.measure import collector_spared
from magis.runtime.packed_weights import merged_inputs
from magis.runtime.steps import GraphStep
from magis.units import format_bytes

BY_ITS_CODE = "part of the step, by the optimizer's own code"
UNGRADED = "it counts steps in a group of parameters without gradients"
DRAWS = "its forward draws on the host which parameters it uses"
VARIANTS = 64
"""Maximum number of cached plans for different random draws of one step."""
RESTLESS = 2
"""Changes of an optimizer's numbers (other than learning rates) after which its update is no longer planned."""


_WHOLE = "calling it runs forward, backward and update; leave out what did these before"
_PORTED = {
    **dict.fromkeys(("backward", "zero_grad", "step", "forward"), _WHOLE),
    **dict.fromkeys(("parameters", "named_parameters", "train", "eval", "to", "modules"), "the module is step.module"),
    **dict.fromkeys(("state_dict", "load_state_dict"), "use those of step.module and step.optimizer"),
}
"""Hints by attribute that a loop may expect of a module or an optimizer."""


class OptimizedStep:
    """A training step that `magis.optimize` made. Calling it runs the step on a batch and returns the loss."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        optimizer: Optimizer | None,
        limits: Limits,
        device: str,
        autocast: torch.dtype | None,
        ranks: Together | None = None,
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self._ranks = ranks
        self._whole, self._loss_fn = with_loss(model, loss_fn)
        self._optimizer = optimizer
        self._limits = limits
        self._pictures = limits.compiler is not None and has_pictures(model)
        self._device = device
        self._autocast = autocast
        self._memory = MemoryGuard(self._whole)
        self._fingerprint: tuple[Any, ...] = ()
        self._restless, self._apart = 0, ""
        self._own_code = OwnCodes(device)
        self._choice = Choice("left to the caller", None)
        self._entries = KeptSteps()
        self._plans: OrderedDict[str, Planned] = OrderedDict()
        self._partial: PartialUpdate | None = None
        self._decided: deque[Decisions] = deque(maxlen=KINDS)
        self._number = 0  # number of the running step, from 1

    def __call__(self, *batch: Any, **keywords: Any) -> Tensor:
        """Run one step, `step(inputs, targets)` or `step(**keywords)`, and return the loss, detached."""
        if self._partial is not None:
            self._partial.check(self._whole, self._optimizer)
            self._partial = None
        given = self._laid_out(as_batch(keywords or (batch[0] if len(batch) == 1 else batch)))
        self._number += 1
        try:
            entry = self.prepare(given)
            if entry.plan.drawn:
                entry = self._drawn(given, entry)
        except Exception as error:
            if isinstance(error, MagisError) and (error.__cause__ is None or isinstance(error.__cause__, MagisError)):
                raise  # a refusal
            self._raise_as_eager(given, error)
        doubt: CaptureError | None = None
        if entry.audits.ran >= entry.audits.due:
            looked_at = self._whole, self._loss_fn, given, entry.plan, entry.numbers, self._autocast
            doubt = self._entries.audit(entry, self._number, lambda: step_difference(*looked_at) or self._coupling())
        if entry.bound is None:
            entry.bound = self._bind(given, entry)
        step: GraphStep = entry.bound.step
        if entry.given is not None and entry.plan.inputs is not None:
            step.given = entry.given.numbers
            constants = constants_of(entry.plan.graph, step.given, self._device)
            entry.given = replace(entry.given, constants=constants)
        loss: Tensor
        started = perf_counter()
        try:
            loss, as_planned = entry.bound.run(given, entry.given)
            entry.ran(planned=as_planned)
        except BaseException as error:
            operator, updated = step.raised(error)
            if operator is None:
                raise
            if updated:
                self._partial = PartialUpdate(updated)
                raise self._partial.error(error) from error
            if not isinstance(error, Exception) or not raises_again(error, operator.target):
                raise
            self._raise_as_eager(given, error, late=operator.phase == "backward")
        finally:
            step.release()
            entry.audits.ran += perf_counter() - started
        if doubt is not None and as_planned:
            self._entries.remove(entry)
            raise doubt
        if any(path.endswith(DATA) for path in entry.plan.results) and not merged_inputs(entry.plan.graph):
            self._memory = MemoryGuard(self._whole)
        return loss

    def prepare(self, batch: Batch, plan: Path | str | None = None) -> KeptStep:
        """Return a plan for batches of this kind in the current state of module and optimizer: cached, read from `plan`
        or new."""
        batch = self._laid_out(batch)
        check_mode(self._device)
        self._look_at_optimizer()
        self._look_at_memory()
        key = self._key(batch)
        vain = self._entries.give_up(key)
        found = self._find(batch, key)
        if found is None:  # module or optimizer changed: decide again what is part of the step
            self._choice, self._memory = self._choose(), MemoryGuard(self._whole)
            found = self._find(batch, self._key(batch)) or self._made(batch, plan)
            found.vain = max(found.vain, vain)
        self._entries.keep(found)
        found.steps += 1
        return found

    def __repr__(self) -> str:
        name = type(self.module).__name__
        if not self._entries:
            return f"<magis.OptimizedStep of {name}, not planned yet>"
        found = self.report()
        peaks = f"{format_bytes(found.planned_bytes)} at peak, {format_bytes(found.original_bytes)} in eager mode"
        return f"<magis.OptimizedStep of {name}: {peaks}; update {found.update}>"

    def __getattr__(self, name: str) -> NoReturn:
        hint = _PORTED.get(name, "")
        raise AttributeError(f"an OptimizedStep has no {name!r}" + (f": {hint}" if hint else ""), name=name, obj=self)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a planned step is bound to its model and optimizer, and cannot be copied or pickled",
            hint="copy these and call magis.optimize on the copies, with plan=, a file of its save()",
        )

    def report(self) -> PlanReport:
        """Return the predicted figures of the step that ran last."""
        return self._entries[-1].plan.report

    def save(self, path: Path | str) -> None:
        """Write the plan of the step that ran last to a text file, which `magis.optimize(..., plan=path)` reads."""
        entry = self._entries[-1]
        write_plan(Path(path), SavedPlan(*entry.plan.constant(entry.numbers), self._limits.asked))

    def _drawn(self, batch: Batch, entry: KeptStep) -> KeptStep:
        """Return the plan for the random numbers that this step draws on the host, with the constants made of them."""
        rule = entry.plan.rule
        with contents_kept(self._whole, self._loss_fn):
            loss_fn = with_targets(self._loss_fn, batch)
            captured = subject_now(self._whole, loss_fn, batch, rule, self._device, self._autocast).captured
        name = outline(captured.graph)
        found = entry.variants.pop(name, None)
        if found is not None and found.bound is not None and not found.bound.is_current(self._choice):
            found.bound = None
        entry.variants[name] = found = found or self._made(batch, None)
        while len(entry.variants) > VARIANTS:
            del entry.variants[next(iter(entry.variants))]
        entry.plan = replace(found.plan, guards=entry.plan.guards)
        found.given = Given({}, {}, captured.after, constants_of(captured.graph, None, self._device))
        return found

    def _laid_out(self, batch: Batch) -> Batch:
        """Return the batch in the layout in which the step runs fastest, if it is compiled."""
        return channels_last(batch) if self._pictures and not batch.copied else batch

    # -- validity of plans --------------------------------------------------------------------------------------

    def _key(self, batch: Batch) -> Any:
        return batch.key(self._memory.storages), self._memory.overlaps

    def _find(self, batch: Batch, key: Any) -> KeptStep | None:
        rule = self._choice.rule
        for entry in reversed(self._entries):
            if entry.key == key and entry.choice.rule == rule and entry.holds(batch):
                if entry.bound is None or entry.bound.is_current(self._choice):
                    return entry
                entry.bound = None
                self._choice = self._choose()
                return entry if self._choice.rule == rule else None
        return None

    def _look_at_memory(self) -> None:
        if self._memory.holds():
            return
        self._memory = MemoryGuard(self._whole)
        for entry in self._entries:
            for one in (entry, *entry.variants.values()):
                one.bound = None

    def _look_at_optimizer(self) -> None:
        """Decide again whether the update is planned if the optimizer has changed; it is not if its numbers keep
        changing."""
        if self._optimizer is None:
            return
        now = fingerprint(self._optimizer)
        if now in (self._fingerprint, self._left()):
            return
        before, self._fingerprint = self._choice, now
        self._choice = self._choose()
        both = before.update is not None and self._choice.update is not None
        if both and (before.rule != self._choice.rule or self._choice.words == BY_ITS_CODE):
            self._restless += 1
            self._choice = self._choose()

    def _left(self) -> tuple[Any, ...]:
        """Return what the last step's update, in the optimizer's own code, has left in its groups."""
        bound = self._entries[-1].bound if self._entries else None
        return bound.state.left if bound is not None and isinstance(bound.state, OwnState) else ()

    def _choose(self) -> Choice:
        if self._optimizer is None:
            return Choice("left to the caller", None)
        trained = trained_parameters(self._whole)
        check_optimizer(self._optimizer, trained)
        why = why_apart(self._optimizer, trained)
        if not why and not self._apart and self._restless <= RESTLESS:
            return Choice("part of the step", update_of(self._optimizer, trained))
        restless = "its numbers change from step to step" if self._restless > RESTLESS else ""
        if not self._apart and not restless and self._ranks is None:
            try:
                return Choice(BY_ITS_CODE, self._own_code.update(self._optimizer, trained))
            except OneByOneError as error:
                restless = str(error)
        words = ", and ".join(filter(None, (why, self._apart or restless)))
        return Choice(f"by the optimizer itself, after the step: {words}", None)

    def _coupling(self) -> str:
        """Describe in words where the optimizer's own code, part of the step, no longer updates each parameter by
        itself; return "" if it does, and for other optimizers."""
        if self._optimizer is None or self._choice.words != BY_ITS_CODE:
            return ""
        return self._own_code.coupling(self._optimizer, trained_parameters(self._whole))

    def _current_update(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> Update:
        """Return the update that is part of the step, for parameters by these names."""
        if self._choice.words == BY_ITS_CODE:
            return self._own_code.update(optimizer, trained, whole=True)
        return update_of(optimizer, trained)

    def _made(self, batch: Batch, plan: Path | str | None) -> KeptStep:
        module = with_keywords(self._whole, batch)
        trained = trained_parameters(module)
        check_hooks(trained)
        choice, rule = self._choice, OptimizerSpec("gradients")
        if self._optimizer is not None and choice.update is not None:
            rule = self._current_update(self._optimizer, trained).spec  # with the wrapped module's parameter names

        def read() -> SavedPlan | None:
            return None if plan is None else read_plan(Path(plan))

        numbers = self._entries.changing(self._key(batch), batch) if self._ranks is None else ()
        saved = read() if self._ranks is None else self._ranks.all_or_none("plan file", read)
        granted = max((known.report.limit_bytes or 0 for known in self._plans.values()), default=0)
        with (
            contents_kept(self._whole, self._loss_fn),
            collector_spared(collect=False),
            planning_shown("magis.optimize") as tell,
        ):
            found = planned(
                self._whole, with_targets(self._loss_fn, batch), batch, rule, replace(self._limits, granted=granted),
                device=self._device, autocast=self._autocast, update=choice.words, saved=saved,
                known=self._plans, decided=self._decided, numbers=numbers,
                optimizer=None if choice.update is not None else self._optimizer, ranks=self._ranks, tell=tell,
            )  # fmt: skip
        misses = False
        if found is not None and self._optimizer is not None and rule.kind == "own":
            misses = self._own_code.misses(self._optimizer, {id(trained[name]) for name in found.graded})
        if found is None or misses:
            self._apart = UNGRADED if misses else DRAWS
            self._choice = self._choose()
            return self._made(batch, plan)
        self._plans[found.digest] = found
        self._plans.move_to_end(found.digest)
        while len(self._plans) > KEPT:
            self._plans.popitem(last=False)
        if found.decisions is not None and not any(found.decisions is each for each in self._decided):
            self._decided.append(found.decisions)
        # an error on one rank would block the others; steps that draw on the host are captured each time anyway
        audited = self._device == "cpu" and self._ranks is None and not found.drawn
        entry = KeptStep(
            self._key(batch), choice, found, Audits(found.capture_seconds if audited else math.inf, self._number)
        )
        entry.holds(batch)
        self._entries.note_inputs(numbers, entry)
        return entry

    def _bind(self, batch: Batch, entry: KeptStep) -> BoundPlan:
        module, loss_fn = with_keywords(self._whole, batch), with_targets(self._loss_fn, batch)
        state, found = None, entry.plan
        if self._optimizer is not None and self._choice.update is not None:
            # as in torch.optim: a parameter without a gradient has no state, and its step counter does not change
            named = {name: p for name, p in module.named_parameters() if name in found.graded}
            take = OwnState if found.rule.kind == "own" else adopted
            state = take(
                self._optimizer, replace(self._choice.update, spec=found.rule), named, moved_state(found.graph)
            )
        functions: dict[str, Callable[..., Any]] = {} if found.compiled is None else {**found.compiled.functions}
        if isinstance(state, OwnState):
            functions |= dict.fromkeys(OWN_UPDATES, state.code.update)
        try:
            step = GraphStep(
                found.graph if found.compiled is None else found.compiled.graph, module, batch.inputs, batch.targets,
                found.rule, device=self._device, states=None if state is None else state.tensors, loss_fn=loss_fn,
                cached=found.cached, stretches=functions,
            )  # fmt: skip
        except BaseException:
            if state is not None:
                state.forget()
            raise
        self._look_at_memory()  # packing may have moved weights
        undo = undo_of(found.graph, step, self._device)
        roots, names = roots_of(module, loss_fn), {id(each): name for name, each in module.named_buffers()}
        homes = ((path, id(follow(roots, path))) for path in found.state)
        replaced = {path: f"buffer:{names[number]}" for path, number in homes if number in names}
        return BoundPlan(found, step, module, state, self._optimizer, loss_fn, self._eager, undo, roots, replaced)

    def _raise_as_eager(self, batch: Batch, error: Exception, *, late: bool = False) -> NoReturn:
        """Raise the error that eager raises for a batch, and leave the state that eager leaves. With several ranks,
        raise `error` and restore the state from before the step, as eager's collectives would wait for the other
        ranks."""
        if self._ranks is not None:
            raise error
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        holders = self._whole, self._loss_fn
        raise_as_eager(error, partial(self._eager, batch), holders, self._device, late=late)

    def _eager(self, batch: Batch) -> Tensor:
        """Run forward, loss and backward in eager mode, as the user's loop would; return the loss, detached."""
        loss_fn = with_targets(self._loss_fn, batch) or own_loss
        with torch.autocast(self._device, self._autocast, enabled=self._autocast is not None):
            loss = loss_fn(with_keywords(self._whole, batch)(*batch.inputs), *batch.targets)
        loss.backward()
        return loss.detach()
