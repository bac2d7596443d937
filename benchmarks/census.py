"""What magis makes of networks that nobody here wrote: one of every family of the common libraries, at tiny sizes.

    python benchmarks/census.py [--library transformers] [--family bert,gpt2] [--jobs 2] [--limit 60]
                                [--first 20] [--seed 0]
                                [--json FILE [--resume]] [--output FILE] [--causes FILE] [--docs docs/census.md]

Networks are built from configurations, without weights; nothing is downloaded. Each runs in a process of its own, with
a limit in seconds and bytes: the gate's case at memory ratio 0.8 (or the smallest of 0.9, 0.95, 1 that has a plan), and
three steps of `magis.optimize` beside a plain loop, bit for bit. See docs/census.md. Needs the extra `census`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the census, as told on the command line, and print its table."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process each: their threads would only take turns
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from magis.quiet import before_torch

    before_torch()
    from benchmarks.census_lib.program import run

    run(__doc__.splitlines()[0])


if __name__ == "__main__":
    main()
