"""The census as text: a line for each network, totals for each library, and failures by their cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

OUTCOMES = ("exact", "wrong", "bytes", "died", "crashed", "slow", "refused", "not reproducible", "not run", "not built")
"""The last three are left out of the rate: eager itself differs from run to run, cannot run here, or no tiny
configuration was found."""
COUNTED = OUTCOMES[:7]
_WORST = ("wrong", "bytes", "crashed", "refused", "no limit")


def outcome(row: Row) -> str:
    stage = row.get("stage", "build")
    if "died" in row:
        if stage == "build":
            return "not built"
        return "slow" if row["died"] == "time limit" else "died"
    if stage in ("not run", "not built"):
        return stage
    found = [row[each]["outcome"] for each in ("gate", "optimize") if each in row]
    if "not reproducible" in found:
        return "not reproducible"
    for each in _WORST:
        if each in found:
            return "refused" if each == "no limit" else each
    return "exact" if found else "not built"


def reason(row: Row) -> str:
    """One line; empty for what is exact."""
    if "died" in row:
        return f"{row['died']} while in {row.get('stage', 'build')}: {row.get('last_words', '')}"
    if "why" in row:
        return str(row["why"])
    said = []
    for each in ("gate", "optimize"):
        found = row.get(each, {})
        if found.get("outcome") not in (None, "exact"):
            said.append((each, f"{found['outcome']}: {found['reason']}"))
    if len(said) == 2 and said[0][1] == said[1][1]:
        return said[0][1]
    return " | ".join(f"{each}: {text}" for each, text in said)


def ratio(row: Row) -> str:
    found = [row[each]["ratio"] for each in ("gate", "optimize") if each in row and row[each]["ratio"]]
    return f"{max(found):g}" if found else "-"


def seconds(row: Row) -> float:
    return float(sum(row.get(each, 0.0) for each in ("gate_s", "optimize_s")))


def summary(row: Row) -> str:
    text = reason(row)
    end = f"  {text[:240]}" if text else ""
    return f"{outcome(row):16} {row['key']:44} {ratio(row):>5} {seconds(row):6.1f} s  {row.get('network', '')}{end}"


def totals(rows: Iterable[Row]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[row["key"].partition("/")[0]][outcome(row)] += 1
        counts["all"][outcome(row)] += 1
    lines = [f"{'library':14} {' '.join(f'{each:>16}' for each in OUTCOMES)}   exact of those counted"]
    for name, found in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        counted = sum(found[each] for each in COUNTED)
        share = f"{found['exact'] / counted:.1%} of {counted}" if counted else "-"
        lines.append(f"{name:14} {' '.join(f'{found[each]:16}' for each in OUTCOMES)}   {share}")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    order = {each: number for number, each in enumerate(OUTCOMES)}
    lines = [
        summary(row)
        for row in sorted(rows, key=lambda row: (row["key"].partition("/")[0], order[outcome(row)], row["key"]))
    ]
    return "\n".join([totals(rows), "", *lines])


def cause(text: str) -> str:
    """A reason without what belongs to one network: numbers, names in quotes, paths of modules."""
    text = text.partition(" | ")[0].removeprefix("gate: ").removeprefix("optimize: ").partition(";")[0]
    text = re.sub(r"\b(?!aten|modeling)\w+(\.\w+){2,}", "<name>", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    text = re.sub(r"\b[\w.]+\.(weight|bias|[a-z_]+_proj\w*)\b", "<tensor>", text)
    text = re.sub(r"[\w/]+\.py:\d+", "<line>", text)
    text = re.sub(r"0x[0-9a-f]+|[-+]?\d[\d,.e+-]*", "#", text)
    text = re.sub(r"\b(module|first|input) [\w.]+", r"\1 …", text)
    return text[:160]


def causes(rows: Sequence[Row], examples: int = 3) -> str:
    """Totals, and failures by cause, those that cost most families first."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        found = outcome(row)
        if found not in ("exact", "not run", "not built"):
            groups[found, cause(reason(row))].append(row)
    lines = [totals(rows), ""]
    for (found, what), members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"{len(members):4}  {found:8} {what}")
        lines += [
            f"          {row['key']}: {row.get('network', '')}: {reason(row)[:400]}" for row in members[:examples]
        ]
        lines.append(f"          families: {', '.join(row['key'].partition('/')[2] for row in members)}")
    return "\n".join(lines)


def left_out(rows: Sequence[Row]) -> str:
    """Families that do not count, with what eager or the library said."""
    lines = []
    for kind in ("not run", "not built", "not reproducible"):
        members = [row for row in rows if outcome(row) == kind]
        lines += [
            f"{kind:16} {row['key']:44} {reason(row)[:160]}" for row in sorted(members, key=lambda row: row["key"])
        ]
    return "\n".join(lines)


BEGIN, END = "<!-- BEGIN census -->", "<!-- END census -->"


def page(text: str, head: str, rows: Sequence[Row]) -> str:
    """A document with the census between its marks: totals, failures by cause, families left out."""
    before, _, rest = text.partition(BEGIN)
    parts = (head, causes(rows, examples=1), "Left out:", left_out(rows))
    shown = "\n\n".join(part for part in parts if part)
    return f"{before}{BEGIN}\n```\n{shown}\n```\n{END}{rest.partition(END)[2]}"
