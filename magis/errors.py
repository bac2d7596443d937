"""The errors that magis raises on purpose, each with a message of one line.

A message says what is wrong, with values, and the way out. Any other exception, a KeyError say, is a bug of magis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from magis.printable import printable

__all__ = [
    "BaselineError",
    "CaptureError",
    "FactoryError",
    "MagisError",
    "PartialUpdateError",
    "StepGivenError",
    "UsageError",
    "VerifyError",
    "nearest",
]


class MagisError(Exception):
    """Base class of all errors that magis raises on purpose; `str(error)` is a single line.

    `message` names the cause and the values; `hint`, where there is one, says what to do instead. Both are passed
    through `printable`, and runs of blanks become one blank.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        line, advice = (" ".join(printable(text).split()) for text in (message, hint))
        super().__init__(f"{line}; {advice}" if advice else line)


class UsageError(MagisError):
    """The request is invalid: an unknown name, a ratio out of range, an unwritable path.

    The plugin prints the line and exits with pytest's code 4 before a case runs or a file is written.
    """


class FactoryError(UsageError):
    """A user's factory of a workload raised an exception or ended the process."""


class StepGivenError(UsageError):
    """A step function and its batch stand where a network is needed; the gate's case "eager" measures that."""

    def __init__(self, name: str, step: Callable[[Any], object], batch: object) -> None:
        what = f"{name}: a step function has no plan: magis plans (module, batch, loss), with an optimizer"
        super().__init__(what, hint="gate the step as it is, with strategies=['eager']")
        self.step, self.batch = step, batch


class BaselineError(UsageError):
    """A stored baseline is unreadable, corrupt or of a newer schema; the file is not changed."""


class CaptureError(MagisError):
    """A training step cannot be captured as one graph; the message names the module, operator or line."""


class PartialUpdateError(MagisError):
    """A step raised an exception after it had updated some weights; the message names them.

    The next step is refused until a state dict is loaded.
    """


class VerifyError(MagisError):
    """A graph or a plan violates an invariant: a bug of magis, never bad input."""


_SYNONYMS = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
    "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64", "amp": "amp-bfloat16", "gpu": "cuda",
}  # fmt: skip
"""Names that other programs use -> the name here."""
_LISTED = 24
"""Most names that a hint lists."""


def nearest(given: object, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the most similar known names (case ignored), then all known names, if they are
    few."""
    import difflib  # here: an idle plugin has no use for it

    by_folded = {name.casefold(): name for name in known}
    name = str(given).casefold().removeprefix("torch.")
    name = _SYNONYMS.get(name, name)
    close = [by_folded[each] for each in difflib.get_close_matches(name, by_folded, n=2, cutoff=0.6)]
    if name in by_folded:
        close = [by_folded[name]]
    more = len(known) - _LISTED
    listed = f"choose from {', '.join(known[:_LISTED])}{f' and {more} more' if more > 0 else ''}"
    if not close:
        return listed
    return f"did you mean {' or '.join(close)}?{f' {listed}' if more <= 0 else ''}"
