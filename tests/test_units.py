"""Bytes and milliseconds as people write them, and the one-line errors."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magis.errors import BaselineError, CaptureError, MagisError, UsageError, VerifyError
from magis.units import GIB, MIB, format_bytes, format_milliseconds, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MIB - 1, "1.00 MiB"),
        (8 * GIB, "8.00 GiB"),
        (-5 * MIB, "-5.00 MiB"),
        (1024**6, "1024.00 PiB"),
    ],
)
def test_bytes_are_written_in_the_largest_fitting_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("12 B", 12),
        ("1.5 MiB", 3 * MIB // 2),
        ("8GiB", 8 * GIB),
        ("  8 gib ", 8 * GIB),
        ("24 GB", 24 * 10**9),
        ("1 kB", 1000),
        ("0.1 KiB", 102),
        ("2 TiB", 2 * 1024**4),
        ("2 PB", 2 * 10**15),
    ],
)
def test_amounts_of_memory_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "8 G", "8 GiB GiB", "1e9", "nan", "8,5 GiB", "1.", "\u0663 GiB"])
def test_anything_else_is_refused_with_the_units_that_would_do(text: str) -> None:
    with pytest.raises(UsageError, match=rf"not an amount of memory: {re.escape(repr(text))}; .* KiB, MiB, GiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_reading_what_was_written_is_off_by_the_printed_digits_only(count: int) -> None:
    text = format_bytes(count)
    number, unit = text.split()
    half_of_the_last_digit = 0.005 * parse_bytes(f"1 {unit}") if unit != "B" else 0
    assert abs(parse_bytes(text) - count) <= half_of_the_last_digit + 1
    assert unit == "B" or 1 <= float(number) < 1024 or unit == "PiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000 ms"),
        (0.0421, "0.042 ms"),
        (1.234, "1.23 ms"),
        (61.375, "61.4 ms"),
        (243.74, "243.7 ms"),
        (9999.0, "9999.0 ms"),
        (12_345.0, "12.3 s"),
        (-12.34, "-12.3 ms"),
    ],
)
def test_milliseconds_have_about_three_digits(value: float, text: str) -> None:
    assert format_milliseconds(value) == text


@pytest.mark.parametrize("kind", [MagisError, UsageError, BaselineError, CaptureError, VerifyError])
def test_an_error_is_one_line_and_can_be_rebuilt(kind: type[MagisError]) -> None:
    error = kind("a ratio of 1.5\n  is too large", hint="give one\tin (0, 1]")
    assert str(error) == "a ratio of 1.5 is too large; give one in (0, 1]"
    assert str(kind("plain")) == "plain"
    twin = copy.copy(error)  # rebuilt from `args`, as a pool of processes would
    assert (type(twin), str(twin)) == (kind, str(error))


def test_a_bad_baseline_is_a_usage_error_and_the_others_are_not() -> None:
    # the plugin answers usage errors with exit code 4; a failed capture or verification is a failed case
    assert issubclass(BaselineError, UsageError)
    assert not issubclass(CaptureError, UsageError)
    assert not issubclass(VerifyError, UsageError)
