"""Which processes of a test are alive, told by a variable in their environment."""

from __future__ import annotations

import time
from pathlib import Path

SIGN = "MAGIS_TEST_SIGN"
"""Set for everything that a test starts, to a path that no other test has."""


def alive(sign: Path) -> dict[int, str]:
    """Command lines of the living processes that have the sign in their environment, by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state != "Z" and f"{SIGN}={sign}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found


def gone_within(sign: Path, seconds: float = 60.0, but: int = 0) -> dict[int, str]:
    """What is still alive of them after that time at most; empty as soon as nothing is."""
    until = time.monotonic() + seconds
    while (left := {pid: line for pid, line in alive(sign).items() if pid != but}) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def wait_for(path: Path, seconds: float = 300.0) -> None:
    """Until a file is there; TimeoutError otherwise."""
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path} within {seconds} s")
        time.sleep(0.05)
