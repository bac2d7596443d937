"""The errors that magis raises on purpose.

Every message is one line: what is wrong, the values that show it, and the way out. Anything else that escapes
(a KeyError, say) is a defect of magis, not of its input.
"""

from __future__ import annotations

from collections.abc import Sequence

from magis.printable import printable

__all__ = [
    "BaselineError",
    "CaptureError",
    "FactoryError",
    "MagisError",
    "PartialUpdateError",
    "UsageError",
    "VerifyError",
    "nearest",
]


class MagisError(Exception):
    """Base of all errors raised on purpose; `str(error)` is always a single line.

    `message` names the cause and the values; `hint`, where there is one, says what to do instead. Either is
    `printable`, with runs of blanks folded into single ones, since such a line ends up in a test report.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        line, advice = (" ".join(printable(text).split()) for text in (message, hint))
        super().__init__(f"{line}; {advice}" if advice else line)


class UsageError(MagisError):
    """The user asked for what cannot be: an unknown name, a ratio out of range, an unwritable path.

    The plugin answers with one line and pytest's exit code 4, before a case runs or a file is written.
    """


class FactoryError(UsageError):
    """A user's function that makes a workload raised, or ended the process."""


class BaselineError(UsageError):
    """A stored baseline is unreadable, corrupt, or of a newer schema; the file stays untouched."""


class CaptureError(MagisError):
    """A training step cannot be captured as one graph; the message names the module, operator or line."""


class PartialUpdateError(MagisError):
    """A step raised after it had updated some weights; the message names them.

    The next step is refused until a state is loaded.
    """


class VerifyError(MagisError):
    """A graph or a plan breaks a rule of all graphs or plans; always a defect, never bad input."""


def nearest(given: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the most similar known names (case ignored), then all of them."""
    import difflib  # here: an idle plugin has no use for it

    by_folded = {name.casefold(): name for name in known}
    close = [by_folded[name] for name in difflib.get_close_matches(given.casefold(), by_folded, n=2, cutoff=0.6)]
    if given.casefold() in by_folded:
        close = [by_folded[given.casefold()]]
    listed = f"choose from {', '.join(known)}"
    return f"did you mean {' or '.join(close)}? {listed}" if close else listed
