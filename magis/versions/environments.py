"""Virtual environments that differ from this one in some requirements, kept for the next time."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from magis.errors import UsageError

FOLDER = "MAGIS_ENVIRONMENTS"
"""The variable that names the folder of kept environments (else pytest-magis/environments in the user's cache)."""
READY = "ready"
"""The file that a finished environment has."""


def is_requirement(text: str) -> bool:
    """Whether a text names releases of a package ("torch==2.12.0", "timm<1.1"), and not a revision of git."""
    try:
        found = Requirement(text)
    except InvalidRequirement:
        return False
    return bool(found.specifier) or (found.url is not None and ":" in found.url and not found.url.startswith("{"))


def environment_of(requirements: Sequence[str], say: Callable[[str], None]) -> Path:
    """The interpreter of an environment that has these requirements and, besides, what this one has.

    It is made once, told by `say`, and kept: its name is a digest of the requirements and of this environment. Packages
    that the requirements bring shadow ours; all others are ours. Raises UsageError with pip's last error where it
    cannot be made; nothing is then left of it.
    """
    place = _folder() / _name(requirements)
    python = place / "bin" / "python"
    if (place / READY).is_file():
        return python
    say(f"installing {' '.join(requirements)} into an environment that is kept: {place}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not (place / READY).is_file():  # another process may have made it meanwhile
                _make(place, requirements)
    except OSError as error:
        raise UsageError(f"cannot make the environment {place}: {error.strerror or error}") from None
    return python


def _make(place: Path, requirements: Sequence[str]) -> None:
    shutil.rmtree(place, ignore_errors=True)  # of an installation that was cut off
    try:
        without = ["--without-pip"] if find_spec("pip") else []  # ours will do
        _run([sys.executable, "-m", "venv", *without, str(place)])
        packages = next(place.glob("lib/python*/site-packages"))
        user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
        ours = [entry for entry in (*site.getsitepackages(), *user) if Path(entry).is_dir()]
        lines = [f"import site; site.addsitedir({entry!r})" for entry in ours]
        (packages / "of_the_other_environment.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *requirements])
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    (place / READY).write_text("\n".join(requirements) + "\n", encoding="utf-8")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        said = " ".join(errors[-1:]).removeprefix("ERROR: ") or "pip failed without a word"
        raise UsageError(said, hint="name releases that pip can install here")


def releases(first: str, last: str) -> list[str]:
    """The releases from one requirement (`name==version`) to another of the same package, both included, in order.

    Pre-releases are left out. Raises UsageError for anything else, and where pip knows no such package.
    """
    good, bad = _pinned(first), _pinned(last)
    if good[0] != bad[0]:
        raise UsageError(f"{first} and {last} are two packages", hint="give two releases of one")
    if good[1] == bad[1]:
        raise UsageError(f"{first} and {last} are the same release", hint="give two releases")
    if find_spec("pip") is None:
        raise UsageError("there is no pip in this environment", hint="install it, or bisect from one that has it")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", good[0], "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if listed is None:
        raise UsageError(f"pip knows no releases of {good[0]}", hint="look at pip index versions")
    known = {good[1], bad[1], *(version for text in listed[1].split(",") if (version := _version(text)) is not None)}
    low, high = sorted((good[1], bad[1]))
    between = [
        each
        for each in sorted(known)
        if low <= each <= high and (each in (low, high) or not (each.is_prerelease or each.local))
    ]
    if good[1] > bad[1]:
        between.reverse()
    return [f"{good[0]}=={each}" for each in between]


def _pinned(text: str) -> tuple[str, Version]:
    requirement = Requirement(text)
    pins = [each for each in requirement.specifier if each.operator == "=="]
    if len(pins) != 1 or (version := _version(pins[0].version)) is None:
        raise UsageError(f"{text} names no single release", hint=f"write {requirement.name}==VERSION")
    return requirement.name, version


def _version(text: str) -> Version | None:
    try:
        return Version(text.strip())
    except InvalidVersion:
        return None


def _folder() -> Path:
    given = os.environ.get(FOLDER)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "pytest-magis" / "environments"


def _name(requirements: Sequence[str]) -> str:
    """Two environments are the same where the interpreter, what it starts from and the requirements are."""
    here = sorted({f"{each.name}=={each.version}" for each in distributions()})  # what pip finds satisfied is ours
    what = "\n".join((sys.version, sys.prefix, *here, *sorted(requirements)))
    first = Requirement(requirements[0]).name
    return f"{first}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
