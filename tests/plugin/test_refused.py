"""Options that cannot be: one line and exit code 4 before anything runs, on the command line and in the ini file."""

from __future__ import annotations

import re

import pytest

from pytest_magis.flags import OPTIONS

TOLERANCES = ("-0.01", "nan", "inf", "5%", "")
BAD = {
    "budget": ("0", "-1", "1.5", "many", "", "1e3", "²", "9" * 30),
    "cache": ("plan", "all", "", "none,plans"),
    "dtype": ("float8", "fp16", "Float32", "torch.float32", ""),
    "latency-ratios": ("0.99", "0", "-1", "nan", "inf", "ten", "1,,2"),
    "latency-tolerance": TOLERANCES,
    "memory-ratios": ("0", "-0.1", "1.01", "80", "nan", "inf", "0,8", "80%", "half", "", "1e400", "1e-999"),
    "memory-tolerance": TOLERANCES,
    "preset": ("tiny", "Small", ""),
    "processes": ("0", "-2", "two", "1.5"),
    "search": ("theirs", "", "paper,theirs", "Paper"),
    "seconds": ("0", "-1", "nan", "inf", "soon", ""),
    "seed": ("-1", "1.5", "x", ""),
    "slack": ("-0.1", "0.95", "20%", "on", "nan", ""),
    "shard": ("0/2", "3/2", "1", "1/", "/2", "1/0", "a/b", "1/2/3", "-1/2", "1.0/2", "²/3", "01/2"),
}


@pytest.mark.parametrize("option", BAD)
def test_a_bad_value_is_one_line_that_names_the_option(gate, option):
    for value in BAD[option]:
        message = gate.refuses("--magis-models=bert", f"--magis-{option}={value}")
        assert re.match(rf"ERROR: --magis-{option}(: | is empty$)", message), message


DTYPES = "float32, tf32, bfloat16, float16, float64, amp-bfloat16, amp-float16"
NAMES = "or name one: quick, default, thorough"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("budget", "0", f"'0' is not a whole number that is at least 1; {NAMES}"),
        ("budget", "Quick", f"'Quick' is not a whole number that is at least 1; {NAMES}"),
        ("budget", "thorough,quick", f"'thorough,quick' is not a whole number that is at least 1; {NAMES}"),
        ("dtype", "fp16", f"unknown dtype 'fp16'; did you mean float16? choose from {DTYPES}"),
        ("memory-ratios", "2", "'2' is not a number above 0 and at most 1"),
        ("processes", "1.5", "'1.5' is not a whole number that is at least 1"),
        ("seconds", "0", "'0' is not a number of seconds above 0"),
        ("seed", "-1", "'-1' is not a whole number that is at least 0"),
        ("slack", "1", "'1' is not a share from 0 (none) to 0.9"),
        ("shard", "3/2", "'3/2' is not one such as 1/4 (the first of four)"),
    ],
)
def test_the_message_is_the_same_for_the_ini_file_and_under_xdist(gate, option, value, message, workers):
    key = f"magis_{option.replace('-', '_')}"
    for given in ((f"--magis-{option}={value}",), ("-o", f"{key}={value}")):
        assert gate.refuses("--magis-models=bert", *given, workers=workers) == f"ERROR: --magis-{option}: {message}"


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("csv", "directory", "it is a directory"),
        ("csv", "missing/rows.csv", "no such directory"),
        ("csv", "conftest.py/rows.csv", "not a directory"),
        ("csv", "/dev/full", "it is not a regular file"),
        ("csv", "/dev/null", "it is not a regular file"),
        ("csv", "/proc/rows.csv", "cannot write /proc/rows.csv"),
        ("csv", "", "--magis-csv is empty"),
        ("markdown", "", "--magis-markdown is empty"),
        ("markdown", "missing/x.md", "no such directory"),
        ("markdown", ".", "it is a directory"),
        ("report", "", "--magis-report is empty"),
        ("report", "missing/x.html", "no such directory"),
        ("report", ".", "it is a directory"),
        ("resume", "conftest.py", "conftest.py is not a directory"),
        ("resume", "/proc/nowhere", "--magis-resume"),
        ("snapshot", "", "--magis-snapshot is empty"),
        ("snapshot", "conftest.py", "conftest.py is not a directory"),
        ("snapshot", "/proc/nowhere", "--magis-snapshot"),
        ("trace", "", "--magis-trace is empty"),
        ("trace", "conftest.py", "conftest.py is not a directory"),
        ("trace", "/proc/nowhere", "--magis-trace"),
        ("device", "tpu", "--magis-device: unknown device 'tpu'; did you mean cpu? choose from cpu, sim:rtx3090"),
        ("device", "none", "--magis-device: unknown device 'none'; choose from cpu, sim:rtx3090"),
        ("device", "sim:rtx9999", "--magis-device: unknown device 'sim:rtx9999'; did you mean sim:rtx3090?"),
        ("device", "sim:RTX3090", "--magis-device: unknown device 'sim:RTX3090'; did you mean sim:rtx3090?"),
        ("device", "rtx3090", "--magis-device: unknown device 'rtx3090'; did you mean sim:rtx3090?"),
        ("device", "CPU", "--magis-device: unknown device 'CPU'; did you mean cpu?"),
        ("device", "cuda", "--magis-device: 'cuda' needs a GPU and none was found; use cpu or sim:<name>"),
        ("device", "", "--magis-device is empty"),
        ("models", "brt", "unknown model 'brt'; did you mean"),
        ("models", "x*", "no model matches 'x*'"),
        ("models", "bert,", "--magis-models: empty item in 'bert,bert,'"),
        ("models", "", "--magis-models: empty item"),
        ("models", "a:b:c", "not a model factory: 'a:b:c'"),
        ("models", "no_such_package_here.nets:make", "no package 'no_such_package_here'"),
        (
            "strategies",
            "zero4",
            "--magis-strategies: unknown strategy 'zero4'; choose from all, eager, magis, magis+amp, amp, checkpoint",
        ),
        ("strategies", "", "--magis-strategies: empty item"),
        ("strategies", "eager,,magis", "--magis-strategies: empty item"),
        ("update", "all", "--magis-update: unknown 'all'; choose from new, moved, better, worse"),
        ("update", "new,wrose", "--magis-update: unknown 'wrose'"),
        ("update", "", "--magis-update: empty item"),
    ],
)
def test_a_place_or_a_name_that_cannot_be_is_told_in_one_line(gate, workers, option, given, message):
    (gate.root / "directory").mkdir()
    assert message in gate.refuses("--magis-models=bert", f"--magis-{option}={given}", workers=workers)


MARKED = "import pytest\n@pytest.mark.magis(memory_ratios=[0.8])\ndef test_net(): ...\n"
UNUSABLE = {
    "device": "nope",
    "csv": "nowhere/x.csv",
    "markdown": "nowhere/x.md",
    "report": "nowhere/x.html",
    "baselines": "file",
    "resume": "file/x",
    "profile": "nowhere",
    "against": "--",
}


@pytest.mark.parametrize("option", UNUSABLE)
def test_what_is_of_no_use_to_a_marked_test_ends_the_run_before_it(gate, option, workers):
    """Workers of pytest-xdist find out first: the process that has the terminal knows no test."""
    gate.pytester.makepyfile(test_mine=MARKED)
    (gate.root / "file").touch()
    assert "Traceback" not in gate.refuses(f"--magis-{option}={UNUSABLE[option]}", "test_mine.py", workers=workers)


@pytest.mark.parametrize("models", [("--magis-models=bert",), ("test_mine.py",)], ids=["by name", "marked"])
def test_baselines_that_cannot_be_written_are_refused_before_they_are_accepted(gate, models):
    gate.pytester.makepyfile(test_mine=MARKED)
    (gate.root / "baselines").touch()
    line = gate.refuses(*models, "--magis-device=cpu", "--magis-update=new")
    folder = gate.root / "baselines"
    said = f"cannot write to {folder / 'cpu'}: not a directory: {folder}; name another directory"
    assert line == f"ERROR: --magis-baselines: {said}"


@pytest.mark.parametrize("given", ["--magis-stategies=eager", "--magis-memory-ratio"])
def test_a_misspelt_option_is_one_line(gate, given):
    assert f"unknown option {given.partition('=')[0]}; did you mean --magis-" in gate.refuses(given)


@pytest.mark.parametrize("option", sorted(option.flag for option in OPTIONS if option.kind.metavar))
def test_two_dashes_are_a_value_like_another(gate, option):
    """argparse takes them for its separator."""
    result = gate("--magis-models=bert", f"{option}=--")
    assert result.ret != pytest.ExitCode.INTERNAL_ERROR
    assert "Traceback" not in result.stderr.str()


def test_a_column_that_fails_costs_no_other_output(gate, workers):
    gate.extend_conftest(
        "def pytest_magis_columns(config):\n    return {'mine': lambda result: 1 // 0, 'yours': lambda result: 2}\n"
    )
    result = gate("--magis-models=bert", "--magis-markdown=s.md", "--magis-update=new", workers=workers)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.outlines if line.startswith("ERROR")] == [
        "ERROR: ZeroDivisionError: integer division or modulo by zero"
    ]
    assert (gate.root / "s.md").is_file()
    assert gate.baseline()
