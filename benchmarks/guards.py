"""Time to look whether Python objects have changed: our snapshots beside dynamo's guards, which are checked in C++.

    .venv/bin/python benchmarks/guards.py [--objects N]

Both watch the same attributes of N objects, eight each, by identity. Prints microseconds a look, and their ratio.
"""

from __future__ import annotations

import time
import timeit

from lib.program import arguments
from torch._C._dynamo.guards import RootGuardManager
from torch._dynamo.guards import GuardManagerType

from magis.capture.snapshot import Snapshot

NAMES, LOOKS, ROUNDS = "abcdefgh", 50, 9


class Settings:
    """Eight numbers."""

    def __init__(self, first: int) -> None:
        vars(self).update({name: float(first + at) for at, name in enumerate(NAMES)})


def guards(objects: list[Settings]) -> RootGuardManager:
    """Dynamo's guards on the identity of every attribute."""
    kind, root = GuardManagerType.GUARD_MANAGER, RootGuardManager()
    every = root.globals_dict_manager({"objects": objects}, "G", {"objects": objects}, kind)
    held = every.dict_getitem_manager("objects", "G['objects']", objects, kind)
    for index, item in enumerate(objects):
        place = held.list_getitem_manager(index, f"G['objects'][{index}]", item, kind)
        for name, value in vars(item).items():
            place.getattr_manager(name, name, value, kind).add_id_match_guard(id(value), [name], None)
    return root


def microseconds(look: object) -> float:
    """The fastest of some rounds."""
    return min(timeit.repeat(look, timer=time.process_time, number=LOOKS, repeat=ROUNDS)) / LOOKS * 1e6  # type: ignore[call-overload]


def main() -> None:
    asked = arguments(__doc__, objects=200).parse_args()
    objects = [Settings(number * len(NAMES)) for number in range(asked.objects)]
    snapshot, root = Snapshot({"objects": objects}), guards(objects)
    if next(snapshot.changes(), None) or not root.check({}):
        raise SystemExit("something has changed")
    ours, theirs = microseconds(lambda: next(snapshot.changes(), None)), microseconds(lambda: root.check({}))
    count = len(objects) * len(NAMES)
    print(f"{count:,} attributes: snapshot {ours:.0f} us, dynamo {theirs:.0f} us ({theirs / ours:.2f})")


if __name__ == "__main__":
    main()
