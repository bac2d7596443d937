"""Callbacks that measure the peak memory of training steps in Hugging Face's `Trainer` and in Lightning.

A step covers all work up to one weight update: with gradient accumulation, several forwards and backwards. It is
measured like a block of `magis.peak`, and so is the step ahead of it, which tells what is left in memory for the next
one. The first evaluation is another such block. Outside of these the callbacks do nothing.
"""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, NoReturn

from magis.current_gate import BLOCK_GATE, NAME
from magis.errors import UsageError
from magis.frontends.block_peak import BlockPeak
from magis.phases import phase
from magis.printable import printable
from magis.units import is_number

__all__ = ["LightningCallback", "MagisCallback"]

EVALUATION = "evaluation"
"""Name of the first evaluation, in words and among baselines."""


@dataclass(frozen=True)
class _Library:
    """Training library: the modules that may define its callback class, and the pip extra that installs it."""

    modules: tuple[str, ...]
    base: str
    extra: str


class StepPeaks:
    """Base of the callbacks of both libraries: measures chosen training steps, and the first evaluation.

    An instance also inherits from the library's own callback class, which is imported on construction.
    """

    _library: ClassVar[_Library]

    def __init__(
        self, name: str = "", tolerance: float = 0.0, *, steps: Sequence[int] = (1, 2), evaluation: bool = True
    ) -> None:
        asked: tuple[object, object] = steps, name  # scripts may pass any type
        numbers = tuple(asked[0]) if isinstance(asked[0], Iterable) else ()
        if not numbers or any(type(step) is not int or step < 1 for step in numbers):
            raise UsageError(f"{self._shown}: steps={steps!r}", hint="number the steps from 1 on: steps=(1, 2)")
        if not is_number(tolerance) or tolerance < 0:
            raise UsageError(f"{self._shown}: tolerance={tolerance!r}", hint="give a share such as 0.01")
        # the gate's rule, which would be heard of when training has ended
        if not isinstance(asked[1], str) or not NAME.fullmatch(f"{name}.step{max(numbers)}"):
            hint = "use letters, digits, '_', '-' and '.', 90 at most"
            raise UsageError(f"{self._shown}: name={name!r}", hint=hint)
        _join(self, self._library)
        self.name = name
        self.tolerance = tolerance
        self.steps = tuple(sorted(set(numbers)))
        self.peaks: dict[int, BlockPeak] = {}
        """Peaks of the latest training by step number."""
        self.evaluation: BlockPeak | None = None
        """Peak of the first evaluation in the latest training."""
        self._evaluates = evaluation
        self._begun = 0
        self._last: BlockPeak | None = None
        """The step ahead of the next one, if it was measured."""
        self._running: tuple[str, BlockPeak, ExitStack] | None = None
        """Step or evaluation that is being measured, in words, and its peak."""

    @property
    def _shown(self) -> str:
        return f"magis.{type(self).__name__}"

    def _training_begins(self, callbacks: Iterable[object]) -> None:
        """Clear earlier peaks. Raises UsageError for a second callback of this kind: measurements cannot overlap."""
        self._step_fails(None)
        self.peaks, self.evaluation, self._last = {}, None, None
        self._begun = 0
        if any(isinstance(each, StepPeaks) and each is not self for each in callbacks):
            raise UsageError(f"{self._shown}: the trainer has two", hint="name all steps in one: steps=(1, 2, 10)")

    def _step_begins(self, device: str, guarded: Iterable[tuple[object, str]] = ()) -> None:
        """Start measuring if this is a chosen step, or the one ahead of it; an error in one of the ``guarded`` methods
        ends the measurement."""
        self._step_fails(None)
        self._begun += 1
        last, self._last = self._last, None
        if {self._begun, self._begun + 1} & {*self.steps}:
            self._measure(f"step {self._begun}", BlockPeak(device, last), guarded)

    def _evaluation_begins(self, device: str, guarded: Iterable[tuple[object, str]] = ()) -> None:
        """Start measuring if this is the first evaluation, as a phase for blocks that the script measures itself."""
        if self._evaluates and self.evaluation is None:
            self._measure(EVALUATION, BlockPeak(device), guarded, phase(EVALUATION))

    def _measure(
        self,
        what: str,
        peak: BlockPeak,
        guarded: Iterable[tuple[object, str]],
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        with ExitStack() as stack:
            stack.enter_context(around or nullcontext())
            stack.enter_context(peak)
            for owner, method in guarded:
                stack.callback(_guard(owner, method, self._step_fails))
            atexit.register(self._step_fails, None)  # standard output is held back meanwhile, and must come through
            stack.callback(atexit.unregister, self._step_fails)
            self._running = what, peak, stack.pop_all()

    def _step_ends(self) -> None:
        """Store the peak of a step after its weight update, or of the evaluation, and print it if it was chosen."""
        if self._running is None:
            return
        what, peak, stack = self._running
        self._running = None
        stack.close()
        if what == EVALUATION:
            self.evaluation = peak
        else:
            self._last = peak
            if self._begun not in self.steps:
                return
            self.peaks[self._begun] = peak
        _tell(f"{self._shown}: {what}: {peak}")

    def _evaluation_ends(self) -> None:
        if self._running is not None and self._running[0] == EVALUATION:
            self._step_ends()

    def _step_fails(self, error: BaseException | None, why: str = "ended ahead of its update") -> None:
        """Drop the current measurement, if any: the step ended without an update, or other code ran inside it."""
        if self._running is not None:
            what, _, stack = self._running
            self._running = None
            stack.close()
            cause = f": {type(error).__name__}" if error is not None else ""
            if what == EVALUATION:
                why = "did not come to its end"
            elif self._begun not in self.steps:
                return
            _tell(f"{self._shown}: {what} {why}{cause}; it was not measured")

    def _training_ends(self) -> None:
        """Compare the peaks with their baselines in a pytest test; elsewhere print which steps were not reached."""
        __tracebackhide__ = True
        self._step_fails(None)
        missing = [step for step in self.steps if step not in self.peaks]
        count = f"{self._begun} step{'' if self._begun == 1 else 's'}"
        said = f"{self._shown}: training ended after {count}: no peak of step {', '.join(map(str, missing))}"
        gate = BLOCK_GATE.get()
        if gate is not None:
            hint = "train for more steps" + (", or name others: steps=(1,)" if self.peaks else "")
            label = f"{self.name}." if self.name else ""
            # first, so that a training that is red for it stores nothing
            rows: dict[str, Any] = {f"{label}step{number}": _NoPeak(said, hint) for number in missing}
            for number, peak in self.peaks.items():
                rows |= peak.rows(f"{label}step{number}")
            if self.evaluation is not None and self.evaluation.tensor_bytes:
                rows |= self.evaluation.rows(f"{label}{EVALUATION}")
            gate(rows, self.tolerance)
        elif missing:
            _tell(said)


@dataclass(frozen=True)
class _NoPeak:
    """Placeholder for the peak of a step that the training did not reach; `result` raises UsageError."""

    said: str
    hint: str

    def result(self, _test: str) -> NoReturn:
        raise UsageError(self.said, hint=self.hint)


class MagisCallback(StepPeaks):
    """Callback that measures steps of `transformers.Trainer`: ``Trainer(...,
    callbacks=[magis.MagisCallback("gpt2")])``.

    The peak of every step in ``steps``, counted from 1, is printed at its end and stored in ``peaks``, by number; that
    of the first evaluation in ``evaluation``, unless that is False. What a step frees of the last one's counts. In a
    pytest test they are compared with their baselines when training ends, as `BlockPeak.gate` does. Gradients and the
    optimizer's state are allocated in the first step. ``name`` distinguishes several trainings of a test, ``tolerance``
    is the share by which bytes may grow. Raises UsageError without transformers.
    """

    _library = _Library(("transformers",), "TrainerCallback", "hf")

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, **_given: Any) -> None:
        trainer = _running_trainer()
        self._training_begins(trainer.callback_handler.callbacks if trainer is not None else ())

    def on_step_begin(self, args: Any, state: Any, _control: Any, **given: Any) -> None:
        if state.is_world_process_zero:
            guarded = [(given["optimizer"], "step"), (given["lr_scheduler"], "step")]
            trainer = _running_trainer()
            if trainer is not None:  # it tells callbacks nothing of errors
                guarded += [(trainer, "training_step"), (trainer.callback_handler, "call_event")]
                guarded += [(trainer.accelerator, "clip_grad_norm_")]
            self._step_begins(args.device.type, guarded)

    def on_step_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        self._step_ends()
        self._evaluation_may_begin(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_given: Any) -> None:
        self._step_fails(None)  # the epoch was stopped, or its data ended, inside a step; evaluation may follow
        self._evaluation_may_begin(args, state, control)

    def _evaluation_may_begin(self, args: Any, state: Any, control: Any) -> None:
        """Start measuring the evaluation that comes next: callbacks are only told of its end."""
        if control.should_evaluate and state.is_world_process_zero and self.evaluation is None:
            trainer = _running_trainer()
            self._evaluation_begins(args.device.type, [(trainer, "evaluate")] if trainer is not None else ())

    def on_evaluate(self, _args: Any, _state: Any, _control: Any, **_given: Any) -> None:
        self._evaluation_ends()

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_given: Any) -> None:
        __tracebackhide__ = True
        if state.is_world_process_zero:
            self._training_ends()


class LightningCallback(StepPeaks):
    """Callback for Lightning's `Trainer` that measures steps: ``Trainer(...,
    callbacks=[magis.LightningCallback("gpt2")])``.

    Arguments and attributes are those of `MagisCallback`. Supports the packages `lightning` and `pytorch_lightning`.
    """

    _library = _Library(("lightning.pytorch", "pytorch_lightning"), "Callback", "lightning")
    _updates: int | None = None
    """Number of weight updates at the start of the step; a step may accumulate gradients of several batches."""

    def on_fit_start(self, trainer: Any, _module: Any) -> None:
        self._updates = None
        self._training_begins(trainer.callbacks)

    def on_train_batch_start(self, trainer: Any, module: Any, _batch: Any, _number: int) -> None:
        if trainer.is_global_zero and trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self._step_begins(module.device.type)

    def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, _number: int) -> None:
        if trainer.global_step != self._updates:
            self._step_ends()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._step_fails(None, "has a validation in it")
        if trainer.is_global_zero and not trainer.sanity_checking:
            self._evaluation_begins(module.device.type)

    def on_validation_end(self, _trainer: Any, _module: Any) -> None:
        self._evaluation_ends()

    def on_train_epoch_end(self, _trainer: Any, _module: Any) -> None:
        self._step_fails(None)  # a batch that ends the epoch gets no on_train_batch_end

    def on_exception(self, _trainer: Any, _module: Any, error: BaseException) -> None:
        self._step_fails(error)

    def on_fit_end(self, trainer: Any, _module: Any) -> None:
        __tracebackhide__ = True
        if trainer.is_global_zero:
            self._training_ends()


def _join(callback: Any, library: _Library) -> None:
    """Add the library's callback class, from an imported module or else an installed one, to an object's bases."""
    found = [each for each in library.modules if sys.modules.get(each) is not None]
    found += [each for each in library.modules if find_spec(each.partition(".")[0]) is not None]
    if not found:
        name = library.modules[0].partition(".")[0]
        raise UsageError(
            f"magis.{type(callback).__name__} needs {name}, which is not installed",
            hint=f"pip install 'pytest-magis[{library.extra}]'",
        )
    base = getattr(import_module(found[0]), library.base)
    if not isinstance(callback, base):
        callback.__class__ = _subclass(callback.__class__, base, library)


@cache
def _subclass(cls: type, base: type, library: _Library) -> type:
    """Return a subclass of both classes, named like ``cls``; instances pickle as ``cls``, without peaks."""

    def reduced(callback: Any) -> tuple[object, ...]:
        # Lightning's trainer adds methods of the module that it trains
        state = {name: value for name, value in vars(callback).items() if name not in ("log", "log_dict")}
        return _unpickled, (cls, library), {**state, "peaks": {}, "evaluation": None, "_last": None, "_running": None}

    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduced}
    return type(cls.__name__, (cls, base), own)


def _unpickled(cls: type[StepPeaks], library: _Library) -> StepPeaks:
    """Create a callback for unpickling, which sets the attributes afterwards."""
    callback = cls.__new__(cls)
    _join(callback, library)
    return callback


def _running_trainer() -> Any:
    """Return the running `transformers.Trainer` from the call stack, since callbacks do not receive it; else None."""
    from transformers import Trainer

    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer):
            return found
        frame = frame.f_back
    return None


def _guard(owner: Any, method: str, told: Callable[[BaseException], object]) -> Callable[[], None]:
    """Wrap a method of an object to report its errors to ``told``, and return a function that unwraps it."""
    if not hasattr(owner, "__dict__"):  # with __slots__, methods cannot be replaced
        return lambda: None
    original = getattr(owner, method)
    own = method in vars(owner)

    @wraps(original)
    def guarded(*args: Any, **given: Any) -> Any:
        try:
            return original(*args, **given)
        except BaseException as error:
            told(error)
            raise

    setattr(owner, method, guarded)
    return partial(setattr, owner, method, original) if own else partial(delattr, owner, method)


def _tell(text: str) -> None:
    """Print a line above progress bars of tqdm."""
    from tqdm import tqdm

    tqdm.write(printable(text))
