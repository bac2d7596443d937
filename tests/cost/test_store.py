"""Profiles: readable, sorted, merged without regard to order, never half-written, bad files left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.cost.profile_store import SCHEMA, Entry, Profile, ProfileError, load, merge, save

DEVICE = {"device": "cpu", "instruction set": "AVX512", "threads": "2", "torch": "2.13.0+cpu"}
entries = st.dictionaries(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=12),
    st.builds(Entry, *(st.integers(1, 10**12) for _ in range(4))),
    max_size=6,
)


@given(entries)
def test_reads_back_as_written(tmp_path_factory: pytest.TempPathFactory, found: dict[str, Entry]) -> None:
    path = tmp_path_factory.mktemp("store") / "profile.json"
    save(Profile(DEVICE, found), path)
    assert load(path) == Profile(DEVICE, found)
    assert list(json.loads(path.read_text())["operators"]) == sorted(found)


@given(entries, entries, entries)
def test_the_order_of_merging_does_not_matter(
    first: dict[str, Entry], second: dict[str, Entry], third: dict[str, Entry]
) -> None:
    a, b, c = (Profile(DEVICE, found) for found in (first, second, third))
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    assert merge(a, b).entries.keys() == first.keys() | second.keys()


def test_the_file_is_one_operator_a_line(tmp_path: Path) -> None:
    os.umask(umask := os.umask(0))
    path = tmp_path / "deep" / "profile.json"
    save(Profile(DEVICE, {"b(1)": Entry(2, 0, 0, 1), "a(1)": Entry(1, 0, 64, 9)}), path)
    assert path.read_text().splitlines() == [
        "{",
        ' "schema": 2,',
        ' "device": {"device": "cpu", "instruction set": "AVX512", "threads": "2", "torch": "2.13.0+cpu"},',
        ' "link": 0,',
        ' "copy_ns": 0,',
        ' "schemas": {},',
        ' "operators": {',
        '  "a(1)": {"ns": 1, "spread": 0, "workspace": 64, "samples": 9},',
        '  "b(1)": {"ns": 2, "spread": 0, "workspace": 0, "samples": 1}',
        " }",
        "}",
    ]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is corrupt: no JSON"),
        ("{", "is corrupt: no JSON"),
        ("[]", "is corrupt: no schema number"),
        ('{"schema": "1"}', "is corrupt: no schema number"),
        ("[" * 100_000, "is corrupt: no JSON"),
        (f'{{"schema": {SCHEMA + 1}}}', f"has schema {SCHEMA + 1}, this version reads {SCHEMA}; update"),
        ('{"schema": 1}', "has schema 1, this version reads 2; record it again"),
        ('{"schema": 2, "operators": {}}', "is corrupt: no device identity"),
        ('{"schema": 2, "device": {"device": 3}, "operators": {}}', "is corrupt: no device identity"),
        ('{"schema": 2, "device": {}}', "is corrupt: no operators"),
        ('{"schema": 2, "device": {}, "operators": {}}', "is corrupt: no schemas"),
        ('{"schema": 2, "device": {}, "link": -1, "operators": {}}', "is corrupt: its link"),
        ('{"schema": 2, "device": {}, "link": 1e9, "operators": {}}', "is corrupt: its link"),
        ('{"schema": 2, "device": {}, "copy_ns": -1, "operators": {}}', "is corrupt: its copies"),
        ('{"schema": 2, "device": {}, "operators": {"k": 3}}', "the entry of 'k' lacks"),
        ('{"schema": 2, "device": {}, "operators": {"k": {"ns": 1, "samples": 2}}}', "the entry of 'k' lacks"),
        (
            '{"schema": 2, "device": {}, "operators": {"k": {"ns": 0, "spread": 2, "workspace": 3, "samples": 4}}}',
            r"the entry of 'k' lacks ns \(above 0\)",
        ),
    ],
)
def test_bad_files_get_one_line_and_stay_as_they_are(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert path.read_text() == text
