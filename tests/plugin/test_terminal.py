"""What a run shows: the table, notes, the progress line."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest


def lines_after(result: pytest.RunResult, start: str) -> list[str]:
    lines = result.outlines
    first = next(index for index, line in enumerate(lines) if line.startswith(start))
    return lines[first:]


def test_the_table(gate, workers):
    gate.accept("--magis-models=bert,vit")
    gate.fake(
        **{"vit[magis-mem0.6]": {"numbers": "within tolerance"}, "bert[magis-mem0.8]": {"note": "looked  at\nit"}}
    )
    table = lines_after(gate("--magis-models=bert,vit", workers=workers), "model ")
    assert table[:8] == [
        "model  strategy  limit    original   optimized  ratio      latency ratio  numbers           verdict",
        "bert   eager     -        1.18 MiB    1.18 MiB  1.000                  -  bit-identical     pass",
        "bert   magis     mem 0.8  1.18 MiB  956.04 KiB  0.790  1.02 [1.01, 1.03]  bit-identical     pass",
        "bert   magis     mem 0.6  1.18 MiB  717.16 KiB  0.592  1.02 [1.01, 1.03]  bit-identical     pass",
        "vit    eager     -        1.18 MiB    1.18 MiB  1.000                  -  bit-identical     pass",
        "vit    magis     mem 0.8  1.18 MiB  954.30 KiB  0.790  1.02 [1.01, 1.03]  bit-identical     pass",
        "vit    magis     mem 0.6  1.18 MiB  715.85 KiB  0.592  1.02 [1.01, 1.03]  within tolerance  pass",
        "bert[magis-mem0.8]: looked at it",
    ]


def test_the_table_fits_a_terminal(gate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    name = "conftest:" + "a_long_name" * 9
    gate.fake(any_case={"numbers": "differs: " + "x" * 500})
    result = gate("--magis-models", f"{name},wide_resnet101_2", "--magis-latency-ratios=1.123456789,1.1")
    table = [line for line in lines_after(result, "model ") if "FAIL" in line and not line.startswith("FAILED")]
    assert len(table) == 6
    assert max(map(len, table)) <= 120
    assert table[0].startswith("confte...")


def on_terminal(gate, *args: str) -> str:
    """The bytes that a terminal gets."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-p", "pytest_magis.plugin", "-p", "no:cacheprovider", *args]
    with subprocess.Popen(command, cwd=gate.root, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # how Linux reports the end of a terminal
                break
            if not part:
                break
            shown += part
        process.wait(timeout=300)
    os.close(controller)
    return shown.decode()


AT_ONCE = """
import magis.progress
magis.progress.SILENCE_S = magis.progress.REWRITTEN_S = magis.progress.LOGGED_S = 0.0
"""


@pytest.fixture
def slow(gate):
    """Cases that say what they are at, in runs that have no patience."""
    gate.extend_conftest(AT_ONCE)
    gate.fake(any_case={"says": ["searching\nplans"]})
    return gate


def screen(shown: str) -> list[str]:
    """The lines of a terminal that got these bytes."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]+", shown):
        if part == "\n":  # which terminals get with a carriage return before it
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b["):
            number = int(part[2:-1] or 1)
            row, column = (row - number, column) if part[-1] == "A" else (row, column + number * (part[-1] == "C"))
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return lines


def test_a_terminal_shows_progress_and_nothing_stays(slow):
    shown = on_terminal(slow, "--magis-models=bert")
    assert re.search(r"bert\[eager\]: searching plans \(\d+ s\)", shown)
    assert "magis FFF" in " ".join(screen(shown))
    assert not [line for line in screen(shown) if "searching" in line]


LONG = "conftest:" + "long_name_" * 8


@pytest.mark.parametrize(("columns", "whole"), [("80", False), ("120", False), ("200", True), (None, True)])
def test_names_are_cut_only_where_there_is_no_room(gate, monkeypatch, columns, whole):
    """In a log there is; a row that takes two lines of a terminal has them to the end."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    for name, fits in ((LONG, whole), (LONG[:40], columns != "120" or whole)):
        result = gate("--magis-models", name, "--magis-latency-ratios=1.1")
        rows = [line for line in lines_after(result, "model ") if "FAIL" in line and not line.startswith("FAILED")]
        assert len(rows) == 2
        assert all((name in row) is fits for row in rows), rows
        if columns is not None:
            assert {-(-len(row) // int(columns)) for row in rows} <= {1 if int(columns) > 110 else 2}
