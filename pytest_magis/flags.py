"""The gate's options as pytest knows them (names, help, ini twins), and how their values are read.

All that an idle plugin loads, hence small: what the values mean is read in `pytest_magis.options`, once models are
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from magis.errors import UsageError

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""In the environment of a run that another one compares itself with: that one's checkout."""


class Option(NamedTuple):
    """One option: `name` with dashes, without "--magis-"; a list takes commas and repetitions."""

    name: str
    metavar: str
    help: str
    is_list: bool = False

    @property
    def flag(self) -> str:
        return f"--magis-{self.name}"

    @property
    def key(self) -> str:
        """Its name in the ini file and as an attribute of `config.option`."""
        return f"magis_{self.name.replace('-', '_')}"


OPTIONS = (
    Option("models", "NAMES", "models to gate: all, seed, names, globs, package.module:factory", is_list=True),
    Option("memory-ratios", "R,...", "memory limits as shares of the original's peak (default: 0.8,0.6)", is_list=True),
    Option("latency-ratios", "R,...", "latency limits as multiples (>= 1) of the original's latency", is_list=True),
    Option("strategies", "NAMES", "what to run models under: all, names, globs (default: eager,magis)", is_list=True),
    Option("ranks", "N", "ranks of distributed strategies, here or as predicted (default: 4)"),
    Option("device", "NAME", "cpu, cuda or sim:<name> (default: cuda if there is one, else cpu)"),
    Option("preset", "NAME", "sizes of the models: small or paper (default: small on cpu, else paper)"),
    Option(
        "dtype",
        "NAME",
        "float32, tf32, bfloat16, float16, float64, amp-bfloat16 or amp-float16 (default: each model's own)",
    ),
    Option("search", "NAMES", "whose search plans: magis, paper (the published one) or both", is_list=True),
    Option("budget", "STATES", "work budget of the search: quick, default, thorough, or states evaluated"),
    Option("seconds", "S", "cap on each search; a row that it stops is not gated"),
    Option("seed", "N", "seed of models, batches and searches (default: 0)"),
    Option("processes", "N", "processes that share each search with fission (default: 1); the result is the same"),
    Option("resume", "DIR", "keep finished pieces of searches there, so that a run that was cut off goes on"),
    Option("cache", "WHAT", "what is kept in pytest's cache for the next run: plans, results, none (default: plans)"),
    Option("shard", "I/N", "run only the I-th of N shares of the models; magis merge joins the results"),
    Option("profile", "FILE", "operator profile that prices latencies; none: estimate (default: the device's, if any)"),
    Option("baselines", "DIR", "directory of the baselines (default: <rootdir>/baselines)"),
    Option("against", "REV", "compare with this git revision, measured in the same run, not with stored baselines"),
    Option("update", "KINDS", "accept and store findings: new, better, worse", is_list=True),
    Option("csv", "FILE", "where to write the results (default: results.csv)"),
    Option("markdown", "FILE", "write the table as Markdown there (default: add it to $GITHUB_STEP_SUMMARY, if set)"),
    Option("pareto", "DIR", "also write each model's front of memory against latency there, as .json and .svg"),
    Option("report", "FILE", "write a report of the run there: one HTML file that opens offline"),
    Option("trace", "DIR", "also write each case's simulated time lines there, for Perfetto"),
    Option("benchmark-json", "FILE", "write latencies there as pytest-benchmark's --benchmark-json does"),
    Option("memory-tolerance", "SHARE", "share by which memory may exceed its baseline (default: 0)"),
    Option(
        "latency-tolerance", "SHARE", "share by which latency may exceed its baseline (default: 0.04; simulated 0.01)"
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}


def add_options(parser: pytest.Parser) -> None:
    """Register every option, each with its ini twin."""
    group = parser.getgroup("magis", "memory-regression gate (magis)")
    for option in OPTIONS:
        action = "append" if option.is_list else "store"
        group.addoption(
            option.flag, dest=option.key, action=action, metavar=option.metavar, default=None, help=option.help
        )
        if option.is_list:
            parser.addini(option.key, option.help, type="linelist", default=None)
        else:
            parser.addini(option.key, option.help, type="string", default=None)


def is_active(config: pytest.Config) -> bool:
    """Whether models were asked for, on the command line or in the ini file."""
    return on_command_line(config, "models") is not None or bool(in_ini(config, "models"))


def any_given(config: pytest.Config) -> bool:
    """Whether any option of the gate was given, on the command line or in the ini file."""
    return any(
        on_command_line(config, option.name) is not None or in_ini(config, option.name) is not None
        for option in OPTIONS
    )


def on_command_line(config: pytest.Config, name: str) -> list[str] | None:
    """What the command line gives for an option, repetitions in order; None if it gives nothing."""
    value = config.getoption(BY_NAME[name].key)
    return value if value is None or isinstance(value, list) else [str(value)]


def in_ini(config: pytest.Config, name: str) -> list[str] | None:
    """The same for the ini file."""
    value = config.getini(BY_NAME[name].key)
    if value is None or value in ("", []):
        return None
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


# What a user wrote for a number or a list, read and checked; messages begin with `shown`, where it was written.

MOST_DIGITS = 18
"""Of a whole number: anything larger is a slip of the hand, and no machine word."""


def items(shown: str, given: Sequence[str]) -> tuple[str, ...]:
    """The parts between commas, each once, in the order written. Raises UsageError for an empty one."""
    parts = [part.strip() for text in given for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{shown}: empty item in {','.join(given)!r}")
    return tuple(dict.fromkeys(parts))


def number(shown: str, text: str, wanted: str, accept: Callable[[float], bool]) -> float:
    """A finite number that `accept` accepts; `wanted` says in words which those are. Raises UsageError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or not accept(found):
        raise UsageError(f"{shown}: {text!r} is not {wanted}")
    return found


def whole(shown: str, text: str, *, least: int) -> int:
    """A whole number that is at least `least`. Raises UsageError."""
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= least):
        raise UsageError(f"{shown}: {text!r} is not a whole number that is at least {least}")
    return int(text)


def share(shown: str, text: str) -> float:
    """A tolerance. Raises UsageError for a negative one."""
    return number(shown, text, "a share such as 0.05 (it must not be negative)", lambda x: x >= 0)


def memory_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Memory limits as shares of the original's peak, each once."""
    return _numbers(shown, given, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def latency_ratios_of(shown: str, given: Sequence[str]) -> tuple[float, ...]:
    """Latency limits as multiples of the original's latency, each once."""
    return _numbers(shown, given, "a number that is at least 1", lambda x: x >= 1)


def _numbers(shown: str, given: Sequence[str], wanted: str, accept: Callable[[float], bool]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(number(shown, item, wanted, accept) for item in items(shown, given)))
