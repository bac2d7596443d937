"""`magis merge`: files joined by case, columns united, contradictions and other files refused in one line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from magis.cli.main import USAGE_ERROR, main

COLUMNS = ("name", "strategy", "device", "preset", "dtype", "memory limit ratio", "latency limit ratio", "verdict")


def row(name: str, verdict: str = "pass", **further: str) -> dict[str, str]:
    cells = (name, "magis", "sim:h200", "paper", "float32", "0.6", "", verdict)
    return {**dict(zip(COLUMNS, cells, strict=True)), **further}


def write(path: Path, *rows: dict[str, str]) -> str:
    columns = list(dict.fromkeys((*COLUMNS, *(column for each in rows for column in each))))
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_columns_are_united_and_fields_stay_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "1.csv", row("bert", note='says "a, b"\nand more', figure="1.50"))
    second = write(tmp_path / "2.csv", row("vit", other="007"))
    assert main(["merge", first, second, "-o", str(tmp_path / "all.csv")]) == 0
    assert read(tmp_path / "all.csv") == [
        row("bert", note='says "a, b" and more', figure="1.50", other=""),
        row("vit", note="", figure="", other="007"),
    ]
    assert capsys.readouterr().out.endswith("all.csv: 2 cases of 2 files, 2 green, 0 red\n")


def test_the_same_row_twice_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(tmp_path / "1.csv", row("bert"), row("vit", "ERROR", note="no"))
    assert main(["merge", first, write(tmp_path / "2.csv", row("bert")), first]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == ["ERROR  vit[magis mem 0.6]: no", "2 cases of 3 files, 1 green, 1 red"]


def test_a_merged_file_can_take_the_place_of_an_input(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1.csv", row("bert")), write(tmp_path / "2.csv", row("vit"))
    assert main(["merge", first, second, "-o", first]) == 0
    assert [each["name"] for each in read(Path(first))] == ["bert", "vit"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["merge", *arguments]) == USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_case_with_two_figures_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write(tmp_path / "1.csv", row("bert")), write(tmp_path / "2.csv", row("bert", "FAIL worse"))
    line = refused(capsys, first, second, "-o", str(tmp_path / "all.csv"))
    assert line == (
        f"ERROR: the case bert[magis mem 0.6] is in {first} and {second}, with different figures; "
        "leave one of them out, or run its share anew"
    )
    assert not (tmp_path / "all.csv").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "its first line has no column 'name'"),
        (b"a,b\n1,2\n", "its first line has no column 'name'"),
        (",".join((*COLUMNS, "name")).encode() + b"\n", "its first line has a column twice"),
        (",".join(COLUMNS).encode() + b"\nbert,magis\n", "row 2 has 2 fields, the header 8"),
        (b"\xff\xfe\x00", "no csv in UTF-8"),
        (",".join(COLUMNS).encode() + b'\n"bert', "no csv in UTF-8"),
        (b"x" * 200_000, "no csv in UTF-8"),
    ],
)
def test_what_is_no_results_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    path = tmp_path / "results.csv"
    if content is not None:
        path.write_bytes(content)
    line = refused(capsys, str(path))
    assert str(path) in line
    assert said in line


def test_searches_tell_cases_apart_and_earlier_files_are_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = write(tmp_path / "1.csv", row("bert"))
    later = write(tmp_path / "2.csv", row("bert", search="magis"), row("bert", "FAIL", search="paper"))
    assert main(["merge", earlier, later]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("FAIL  bert[magis paper mem 0.6]")
    assert said[-1] == "2 cases of 2 files, 1 green, 1 red"
