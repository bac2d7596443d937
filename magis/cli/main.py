"""`magis COMMAND ...`: reads the command line, and answers a user's mistake with one line and exit code 4."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from magis.cli import fit, merge, profile
from magis.errors import MagisError, UsageError
from magis.quiet import before_torch

__all__ = ["USAGE_ERROR", "main"]

USAGE_ERROR = 4
"""pytest's exit code for wrong input."""
FAILED, INTERRUPTED = 1, 130


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print over several lines."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Arguments are those of the process unless they are given."""
    parser = _Parser(prog="magis", description="Memory of PyTorch training steps: tools beside the pytest plugin.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    profile.add(commands)
    merge.add(commands)
    fit.add(commands)
    try:
        asked = parser.parse_args(arguments)
        before_torch()
        run = asked.run
        return int(run(asked))
    except UsageError as error:
        print(f"ERROR: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except MagisError as error:
        print(f"ERROR: {error}", file=sys.stderr)  # noqa: T201
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
