"""Random training steps and loops against eager mode: `python benchmarks/fuzz.py --programs 2000 --loops 500 --seed 0`.

Each is drawn by its seed, runs in eager mode and with magis, and everything that a user can see afterwards is compared
bit by bit (`tests/fuzz/judge.py`); training steps are judged as cases of the gate, too, bytes included. Crashes and
hangs cost a child process. `--shrink SECONDS` shortens what fails, as long as it fails in the same way, and `--show`
prints it: as a program that runs by itself but for `step`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from lib.program import arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.fuzz.soak import judged_in_children, table


def main() -> int:
    """Print the table; 1 where something is wrong or died."""
    asked = arguments(__doc__, programs=40, loops=15, seed=0)
    asked.add_argument("--shrink", type=float, default=0.0, metavar="SECONDS")
    asked.add_argument("--show", action="store_true", help="print each failing program")
    asked.add_argument("--output", type=Path, help="a file for every outcome, a JSON line each")
    options = asked.parse_args()
    failed = False
    for kind, count in (("programs", options.programs), ("loops", options.loops)):
        started, rows = time.perf_counter(), []
        for row in judged_in_children(kind, range(options.seed, options.seed + count), shrink_s=options.shrink):
            rows.append(row)
            if options.output:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"what": kind, **row}) + "\n")
            if row["kind"] not in ("equal", "refused"):
                print(f"{kind} {row['seed']}: {row['kind']}: {row['detail']}", flush=True)
                if options.show:
                    print(row["source"], flush=True)
        print(f"== {kind} ({time.perf_counter() - started:.0f} s)\n{table(rows)}\n", flush=True)
        failed |= any(row["kind"] not in ("equal", "refused") for row in rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
