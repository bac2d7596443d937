"""Scratch of operators that a process of its own tries out, which may die of it.

Run as ``python -m magis.backend.aside``: signatures come as lines on standard input, answers leave as lines on standard
output, one each, `null` for a call that raises. Whoever asks sees from the end of the answers which call ended the
process, leaves that one out and goes on with the next in a process of its own. Starting one takes seconds, so only
operators that need it are tried this way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import torch

from magis.backend.isolated import measure_here
from magis.cost.signature import parse

__all__ = ["main", "measured_aside"]

PATIENCE_SECONDS = 120
"""For all calls of one process together: a kernel that made-up numbers send into an endless loop ends with it."""


def measured_aside(keys: Sequence[str]) -> dict[str, int]:
    """Workspace bytes by signature; left out are those that raised, ended their process, or never came back."""
    found: dict[str, int] = {}
    pending = list(keys)
    while pending:
        answers = list(_answers(pending))
        found.update({key: nbytes for key, nbytes in zip(pending, answers, strict=False) if nbytes is not None})
        pending = pending[len(answers) + 1 :]  # without the one that it died of
    return found


def _answers(keys: Sequence[str]) -> Iterator[int | None]:
    paths = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 (an empty one stands for this folder)
    command = [sys.executable, "-P", "-m", "magis.backend.aside", str(torch.get_num_threads())]
    with tempfile.TemporaryFile("w+") as asked:
        asked.writelines(f"{key}\n" for key in keys)
        asked.seek(0)
        process = subprocess.Popen(
            command,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the one who asks
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )
        try:
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
    for line in said.splitlines():
        yield json.loads(line)


def main() -> None:
    """Answer line by line until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kernels and profilers that print
    for line in sys.stdin.read().splitlines():
        nbytes = measure_here([parse(line)]).get(line)
        answers.write(f"{json.dumps(nbytes)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
