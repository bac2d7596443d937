"""A plan bound to the tensors of a module and an optimizer, and the code that runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from magis.capture.python_state import advance
from magis.capture.workload import Batch
from magis.frontends.kept_steps import Choice
from magis.frontends.number_inputs import Given
from magis.frontends.optimizer_state import OptimizerState
from magis.frontends.own_state import OwnState
from magis.frontends.planned import Planned
from magis.frontends.undoing import ContentsBefore, Undo
from magis.ops.call import ExpectationError
from magis.ops.generators import held_generators
from magis.ops.optimizers import scalars
from magis.ops.python_objects import DATA, follow, found_at, leave, told
from magis.printable import warn
from magis.runtime.steps import GraphStep

OTHER_WAY = "a batch takes another way at a branch on data than the planned step: eager mode runs it, in eager's memory"


@dataclass(eq=False)
class BoundPlan:
    """A plan bound to the tensors of a module and an optimizer."""

    plan: Planned
    step: GraphStep
    module: nn.Module
    state: OptimizerState | OwnState | None
    optimizer: Optimizer | None
    loss_fn: Callable[..., Tensor] | None
    eager: Callable[[Batch], Tensor]
    undo: Undo
    roots: Mapping[str, object]
    replaced: Mapping[str, str]
    """Paths to buffers that every step replaces by new tensors, with the buffers' names in the graph."""

    def is_current(self, choice: Choice) -> bool:
        known = self.step.generators
        if known and known != held_generators(self.module, self.loss_fn):  # few steps have own generators
            return False
        homes = None if choice.update is None else choice.update.homes
        return self.state is None or (self.state.update.homes == homes and self.state.is_current())

    def run(self, batch: Batch, given: Given | None = None) -> tuple[Tensor, bool]:
        """Run one step; return its loss, and False if eager ran it because the batch took another branch than
        planned."""
        kept: ContentsBefore | None = None
        emptied: list[str] = []
        try:
            self.step.prepare()
            if not self.undo.expects:  # eager's branch may not replace them
                for path in self.plan.results:  # freed before the step makes new ones
                    if path not in self.plan.state and not path.endswith(DATA):
                        leave(self.roots, path, None)
                        emptied.append(told(path))
            self.step.feed({name: follow(self.roots, path) for path, name in self.replaced.items()})
            self.step.feed(batch.by_name)
            if given is not None:
                self.step.feed(given.constants)
            kept = self.undo.now()
            loss = self._gradients() if self.state is None else self._updated(self.state)
        except BaseException as error:
            operator, updated = self.step.raised(error)
            if kept is not None and operator is not None and not updated:  # not in the optimizer's own step
                kept.put_back()
            if self.state is not None:
                self.state.forget()
            if not isinstance(error, ExpectationError):
                if emptied:
                    error.add_note(f"{' and '.join(emptied)} held results of the step before: None until the next one")
                raise
            warn(OTHER_WAY, stacklevel=3)
            return self._eagerly(batch), False
        if given is not None and given.after is not None:
            given.after.restore()
        if given is not None and self.plan.inputs is not None:
            self.plan.inputs.leave(given.left)
        return loss, True

    def _leave_behind(self, results: Sequence[Tensor]) -> None:
        """Store the tensors and counters that a forward leaves in Python objects, before hooks of the optimizer read
        them."""
        for path, tensor in zip(self.plan.results, results[1:], strict=False):
            leave(self.roots, path, tensor)
        advance(self.roots, self.plan.counted)

    def _eagerly(self, batch: Batch) -> Tensor:
        """Run one step in eager mode, optimizer included, and return its loss."""
        self.step.prepare()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.eager(batch)
        for path in self.plan.results:  # as planned steps leave them, without eager's graph
            left = found_at(self.roots, path)
            if isinstance(left, Tensor) and left.requires_grad:
                leave(self.roots, path, left.detach())
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _updated(self, state: OptimizerState | OwnState) -> Tensor:
        optimizer = state.optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        with state.step_to_come() as numbers:
            loss = self.step.run_with(numbers)
        if isinstance(state, OwnState) and state.is_new:
            self.step.feed(state.inputs)
        self.step.finish()
        self._leave_behind(self.step.results())
        self.step.prepare()
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False):  # learning-rate schedulers warn without this mark
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 (torch has no other way)
        return loss

    def _gradients(self) -> Tensor:
        """Run the planned forward and backward, add gradients to `.grad`, then call the optimizer's `step()` if there
        is one."""
        parameters = dict(self.module.named_parameters())
        gradient: Tensor | None = None
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.step.run_with(scalars(self.plan.rule, 1))
        self.step.finish()
        found = self.step.results()
        gradients = found[len(found) - len(self.plan.graded) :]
        self._leave_behind(found)
        self.step.prepare()
        for name, gradient in zip(self.plan.graded, gradients, strict=True):
            parameter = parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if self.optimizer is not None:
            del found, gradients, gradient
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss
