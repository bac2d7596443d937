"""Delta debugging of scripts: the shortest one that still fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.script import LISTS, Script, shortened

__all__ = ["shrunk"]

Fails = Callable[[Script], bool]
ASSIGNED = re.compile(r"\bv\d+(?:\[\d+\])?\b")


def shrunk(script: Script, fails: Fails, *, seconds: float = 60.0) -> Script:
    """Shortened as long as it fails, at most for so many seconds of the processor. `fails` runs a script: it
    says no to one that eager mode cannot run, or that fails in another way."""
    end = time.process_time() + seconds
    plain = replace(script, limit=(("memory_ratio", 1.0),))
    script = plain if fails(plain) else script
    changed = True
    while changed and time.process_time() < end:
        changed = False
        for section in LISTS:
            script, smaller = _without(script, section, fails, end)
            changed |= smaller
        for candidate in _rewritten(script):
            if time.process_time() > end:
                break
            if fails(candidate):
                script, changed = candidate, True
                break
    return script


def _without(script: Script, section: str, fails: Fails, end: float) -> tuple[Script, bool]:
    """With as few statements in a section as chunks of falling sizes can be left out."""
    size, changed = max(1, len(getattr(script, section)) // 2), False
    while size:
        at = len(getattr(script, section))
        while at > 0 and time.process_time() < end:
            low = max(0, at - size)
            found = next((each for each in _cut(script, section, low, at) if fails(each)), None)
            if found is not None:
                script, changed = found, True
            at = low
        size //= 2
    return script, changed


def _cut(script: Script, section: str, low: int, high: int) -> Iterator[Script]:
    """Without statements `low` to `high`; of a single one that makes a tensor, also with others in its place."""
    lines = getattr(script, section)
    yield shortened(script, section, lambda number: not low <= number < high)
    if section != "forward" or high - low != 1:
        return
    made = re.match(r"(v\d+) = (.*)", lines[low], re.DOTALL)
    if made is None:
        return
    for other in dict.fromkeys((*script.takes, *ASSIGNED.findall(made[2]), *re.findall(r"self\.\w+", made[2]))):
        replaced = tuple(
            re.sub(rf"\b{made[1]}\b(?:\[\d\])?(?! =)", lambda _match, other=other: other, line)  # type: ignore[misc]
            for line in lines[low + 1 :]
        )
        result = re.sub(rf"\b{made[1]}\b(?:\[\d\])?", other, script.result)
        yield replace(script, forward=(*lines[:low], *replaced), result=result)


def _rewritten(script: Script) -> Iterator[Script]:
    """Simpler forms of single parts, each of which makes the script shorter or plainer."""
    for loss in ("out.sum()", "out.square().mean()", "out.abs().sum()", "sum(o.abs().sum() for o in out)"):
        if len(loss) < len(script.loss):
            yield replace(script, loss=loss, targets=(), batch=tuple(x for x in script.batch if not x.startswith("t0")))
            yield replace(script, loss=loss)
    for optimizer in ("optimizer = None", "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"):
        if len(script.optimizer) == 1 and len(optimizer) < len(script.optimizer[0]):
            yield replace(script, optimizer=(optimizer,))
    if script.autocast:
        yield replace(script, autocast="")
    if len(script.takes) > 1:
        for name in script.takes[1:]:
            takes = tuple(each for each in script.takes if each != name)
            yield replace(
                script, takes=takes, inputs=takes, batch=tuple(x for x in script.batch if not x.startswith(name))
            )
    if script.result.startswith("("):
        for part in script.result.strip("()").split(", "):
            yield replace(script, result=part, loss="out.abs().sum()")
    yield from _simpler(script)


def _simpler(script: Script) -> Iterator[Script]:
    """With single statements of the forward, the batch or the sub-modules put more simply."""
    for section in ("forward", "batch", "init"):
        lines = getattr(script, section)
        for number, line in enumerate(lines):
            for pattern, simple in SIMPLER:
                changed = re.sub(pattern, simple, line)
                if changed != line:
                    yield replace(script, **{section: (*lines[:number], changed, *lines[number + 1 :])})  # type: ignore[arg-type]


SIMPLER = (
    (r", dtype=torch\.(float64|bfloat16)", ""),
    (r", requires_grad=False", ""),
    (r", persistent=False", ""),
    (r"nn\.Sequential\((.*), nn\.Tanh\(\)\)", r"nn.Sequential(\1)"),
    (r"\[(1:|::2|\.\.\., ::2)\]", ""),
    (r"\.transpose\(0, 1\)\.contiguous\(\)\.transpose\(0, 1\)", ""),
    (r" = (?:torch|F)\.\w+\((v\d+|x\d)\)$", r" = \1 * 1"),
    (r" [-+*/] (?:v\d+|x\d|self\.\w+)$", r""),
)
