"""Plans whose operators wait for host copies, for memory limits that no other plan keeps.

A search places copies so that no operator ever waits for one. With a host link that is faster than the device's, it
finds plans that swap more; on the device these wait, and their latency is computed with all waits (`elapsed_ns`).
"""

from __future__ import annotations

import copy

from magis.planner.subject import Subject
from magis.planner.update_lists import without_cached

HURRIES = (1.5, 3.0, 8.0, 64.0)
"""Factors of the host link's speed that are tried."""
_OF_LINK = ("roofline", "_work")
"""Cached members of a subject that depend on the link's speed."""


def with_hurry(subject: Subject, hurry: float) -> Subject:
    """Return the subject with a host link that is faster by this factor in searches."""
    found = without_cached(copy.copy(subject), _OF_LINK)
    found.hurry = hurry
    return found
