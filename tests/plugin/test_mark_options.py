"""Arguments of the mark: what they mean, and how wrong ones are refused."""

from __future__ import annotations

import pytest

from magis.report.results_table import case_name
from pytest_magis.flags import MARK_ARGUMENTS, OPTIONS, Settings


def lines(result, start):
    return [line for line in result.outlines if line.startswith(start)]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("(memory_ratio=0.8)", "@pytest.mark.magis takes no 'memory_ratio'; did you mean memory_ratios"),
        ("([0.8])", "@pytest.mark.magis takes names only, as in @pytest.mark.magis(memory_ratios=[0.8])"),
        ("(memory_ratios=[1.5])", "@pytest.mark.magis: memory_ratios: '1.5' is not a number above 0 and at most 1"),
        ("(memory_ratios='')", "@pytest.mark.magis: memory_ratios: empty item in ''"),
        ("(latency_ratios=0.9)", "@pytest.mark.magis: latency_ratios: '0.9' is not a number that is at least 1"),
        ("(strategies='fast')", "strategies: unknown strategy 'fast'; choose from all, eager, magis, magis+amp"),
        ("(budget=0)", "@pytest.mark.magis: budget: '0' is not a whole number that is at least 1; or name one: quick"),
        ("(dtype='int8')", "@pytest.mark.magis: dtype: unknown dtype 'int8'"),
        ("(name='../x')", "@pytest.mark.magis: name: '../x' cannot be a name"),
        ("(name='bert')", "@pytest.mark.magis: name: magis has a model called 'bert' already"),
        ("(seed=-1)", "@pytest.mark.magis: seed: '-1' is not a whole number that is at least 0"),
        ("(memory_limit='2 G')", "@pytest.mark.magis: memory_limit: not an amount of memory: '2 G'"),
        (
            "(memory_limit=0)",
            "@pytest.mark.magis: memory_limit: 0 is no amount of memory above 0; give bytes, or a text",
        ),
        ("(memory_limit=1.5)", "@pytest.mark.magis: memory_limit: 1.5 is no amount of memory above 0"),
        (
            "(memory_limit=9, strategies='magis+compile')",
            "strategy 'magis+compile' takes no memory_limit; give memory_ra",
        ),
        (
            "(memory_limit=9, strategies='magis+fsdp')",
            "strategy 'magis+fsdp' takes no memory_limit; give memory_ratios",
        ),
        ("(seed=[0, 1])", "@pytest.mark.magis: seed: [0, 1] is a list, and it takes one value; give one item alone"),
        ("(device=['cpu', 'sim:a100'])", "@pytest.mark.magis: device: ['cpu', 'sim:a100'] is a list"),
        ("(seconds=[])", "@pytest.mark.magis: seconds: [] is a list, and it takes one value"),
        ("(strategies='torch.eager')", "strategies: unknown strategy 'torch.eager'"),
        ("(memory_tolerance=-1)", "@pytest.mark.magis: memory_tolerance: '-1' is not a share such as 0.05"),
    ],
)
def test_a_wrong_mark_is_one_line_of_collection(gate, mark, message):
    (gate.root / "test_memory.py").write_text(f"import pytest\n@pytest.mark.magis{mark}\ndef test_net(): ...\n")
    result = gate()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert lines(result, f"test_memory.py::test_net: {message}"), result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert "another exception" not in result.stdout.str()


BYTES = """
import pytest

@pytest.mark.magis(memory_limit="1.5 GiB", memory_ratios=[0.8])
def test_net(): ...

@pytest.mark.magis(memory_limit=2_000_000, strategies="magis")
def test_small(): ...
"""


def test_a_limit_in_bytes_is_a_case_of_its_own(gate, workers):
    (gate.root / "test_memory.py").write_text(BYTES)
    gate("--magis-update=new", "--magis-csv=rows.csv", "--magis-csv-full", workers=workers).assert_outcomes(passed=4)
    rows = {(row["name"], row["memory limit ratio"], row["strategy"]): row for row in gate.rows("rows.csv")}
    assert rows["test_memory.test_net", "", "magis"]["memory limit bytes"] == str(3 * 2**29)
    assert rows["test_memory.test_small", "", "magis"]["memory limit bytes"] == "2000000"
    cases = gate.baseline("test_memory.test_net")["configurations"]["small"]["cases"]
    assert set(cases) == {"eager", "magis-mem0.8", "magis-mem1536MiB"}
    for options in ((), ("--magis-csv-full",)):
        gate("--magis-csv=rows.csv", *options)
        found = {case_name(row) for row in gate.rows("rows.csv")}
        assert {"test_memory.test_net[magis mem 1536MiB]", "test_memory.test_small[magis mem 2000000B]"} < found
    gate("--magis-memory-ratios=0.5").assert_outcomes(passed=4)
    result = gate()
    assert lines(result, "test_memory.test_net    magis     mem 1.50 GiB")
    assert lines(result, "test_memory.test_small  magis     mem 1.91 MiB")


def test_an_empty_list_of_strategies_leaves_those_of_the_run(gate):
    mark = "@pytest.mark.magis(strategies=[], dtype='torch.float64')"
    (gate.root / "test_memory.py").write_text(f"import pytest\n{mark}\ndef test_net(): ...\n")
    gate("--magis-strategies=eager", "--magis-update=new", "--magis-csv=rows.csv").assert_outcomes(passed=1)
    assert [(row["strategy"], row["dtype"]) for row in gate.rows("rows.csv")] == [("eager", "float64")]


def test_pytest_names_all_that_a_mark_takes(gate):
    (line,) = lines(gate("--markers"), "@pytest.mark.magis(")
    arguments = line.partition("(")[2].partition(")")[0].split(", ")
    assert arguments == ["*", *MARK_ARGUMENTS]
    assert {"memory_limit", "memory_ratios", "slack", "optimizer", "required"} <= set(MARK_ARGUMENTS)


def test_the_default_of_each_option_is_a_value_that_it_takes():
    from magis.results import Case

    for option in OPTIONS:
        default = getattr(Settings(), option.field)
        if default not in (None, "", (), frozenset()):
            texts = [str(each).lower() for each in (default if isinstance(default, tuple) else (default,))]
            assert option.kind.value(option.flag, texts) == default, option.flag
    assert (Settings.slack, Settings.seed, Settings.memory_limit_of) == (Case.slack, Case.seed, Case.memory_limit_of)
    assert option_refuses("slack", Case.MOST_SLACK) is False
    assert option_refuses("slack", Case.MOST_SLACK + 0.001) is True


def option_refuses(name, value):
    from magis.errors import UsageError
    from pytest_magis.flags import BY_NAME

    try:
        BY_NAME[name].kind.value(name, [str(value)])
    except UsageError:
        return True
    return False


def test_experts_options_stand_in_a_group_of_their_own(gate):
    text = gate("--help").stdout.str()
    _, _, behind = text.partition("memory-regression gate (magis, expert):")
    group = behind.split("\n\n", 1)[0]
    expert = {option.flag for option in OPTIONS if option.expert}
    names = ("slack", "host-limit", "allocator", "processes", "resume", "accumulate", "ranks", "search")
    assert expert == {f"--magis-{name}" for name in names}
    assert {word.partition("=")[0] for word in group.split() if word.startswith("--magis-")} == expert
