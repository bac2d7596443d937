"""Names, paths and messages of users in every output: they can be read, and do nothing else."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from dataclasses import replace
from xml.etree import ElementTree as ET

from hypothesis import example, given
from hypothesis import strategies as st

from magis.errors import MagisError
from magis.frontends.limits import PlanReport
from magis.module_bytes import ModuleBytes, StepGrowth
from magis.printable import printable, warn
from magis.report import read_results, write_csv
from magis.report.pictures import label
from magis.units import aligned
from pytest_magis.findings import Finding
from pytest_magis.gate import row
from pytest_magis.outputs.benchmark import figures
from pytest_magis.outputs.github import error_lines, markdown
from pytest_magis.outputs.html.page_parts import text
from pytest_magis.run_plan import Outcome
from pytest_magis.verdict import Verdict
from tests.plugin.pages import Page
from tests.plugin.verdicts import result

HOSTILE = (
    *("\n::error::x", "a\r\n::set-output name=b::c", "::add-mask::a", "\u2028 ::stop-commands::t", "x ##[error]y"),
    *("##vso[task.setvariable variable=a]b", "##teamcity[buildStatus status='SUCCESS']", "\ud800", "a\udfff", "\x00"),
    *("\x1b[2J\x1b]0;title\x07", "\x9b31m", "a\rb", "\x85", "\u202eb\u2066", "a\u200bb\ufeff", "\U000e0001", "\x7f"),
    *("a|b", "<script>alert(1)</script>", "</script><!--", "`x`", "[a](javascript:b)", "' onload='x", '"><img src=x>'),
    *("=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd", "@SUM(A1)", "\t=1+1", "\r\n@x", "\uff1dSUM(1)", 'a,"b"', "é 漢 👍"),
)
NAMES = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=())), st.text(st.sampled_from("\n\r\t :#[=-@|<"))
)
FORMULAS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")


def outcome_of(name: str) -> Outcome:
    """A red case that says the name wherever text of users can stand."""
    made = replace(result(), note=name, numbers=f"differs: {name}", identity={"cpu": name})
    verdict = Verdict(False, f"FAIL {name}", (Finding("worse", name, why=name),), (name,))
    return Outcome(name, name, made.case, verdict, made, error=name, where=f"{name}::test", trace="")


def can_only_be_read(line: str) -> bool:
    return line.isprintable() and not line.lstrip().startswith("::") and not any(c in line for c in ("##[", "##vso["))


@given(NAMES)
@example("a" * 3 + " " * 50_000)
def test_a_line_shows_every_character_and_changes_nothing_twice(name):
    shown = printable(name)
    assert can_only_be_read(shown)
    assert printable(shown) == shown
    assert shown.encode().decode() == shown
    assert can_only_be_read(str(MagisError(name, hint=name)))
    if name.isprintable() and not name.lstrip().startswith("::") and "##" not in name:
        assert shown == name
    (header, cells) = aligned([["name"], [name]], left=(0,))
    assert can_only_be_read(header)
    assert can_only_be_read(cells)


@given(NAMES)
def test_warnings_and_what_users_print(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(f"model.{name} keeps results")
    growth = StepGrowth(1, 3, (ModuleBytes("saved", f"net.{name}", 1, 1, f"{name}.py:3"),))
    report = PlanReport(2, 1, None, 1.0, 0, 0, name, name, name, 0.0)
    for line in (str(caught[0].message), str(growth), *str(report).split("\n")):
        assert can_only_be_read(line)
    assert len(str(report).split("\n")) == 8


@given(NAMES)
def test_files_and_pages(tmp_path_factory, name):
    outcome = outcome_of(name)
    path = tmp_path_factory.getbasetemp() / "hostile.csv"
    write_csv(path, [row(outcome, {"mine": lambda _: name})])
    content = path.read_bytes().decode()
    assert all(map(can_only_be_read, content.removesuffix("\n").split("\n")))
    for field in next(csv.DictReader(io.StringIO(content))).values():
        assert not field.lstrip().startswith(FORMULAS) or len(field.strip()) == 1 or float(field) is not None
    assert len(read_results(path)) == 1

    said = markdown([outcome], [("--magis-device", name)])
    rows = [line for line in said.split("\n") if line.startswith("|")]
    assert len(rows) == 3
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "<script" not in re.sub(r"`pytest [^`]*`", "", said)
    assert all(map(can_only_be_read, said.removesuffix("\n").split("\n")))

    (command,) = error_lines([outcome])
    assert command.isprintable()
    assert command.startswith("::error title=magis%3A%3A")
    assert "\n" not in command

    page = Page(f'<!DOCTYPE html>\n<html lang="en"><p title="{text(name)}">{text(name)}</p></html>')
    assert [tag for tag, _ in page.tags] == ["html", "p"]
    assert "".join(page.texts) == f"\n{printable(name)}"
    assert ET.fromstring(label((0, 0), name)).text in (printable(name), None)
    for _, value in figures(outcome):
        assert not isinstance(value, str) or can_only_be_read(value)


def test_a_run_ends_well_and_every_file_of_it_can_be_read(gate, workers, monkeypatch):
    """All of them at once, as modules of a step that grew and as the error of a case that could not run."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    held = {f"{name}{at}": 1000 + at for at, name in enumerate(HOSTILE)}
    gate.fake(any_case={"held": held})
    gate.accept("--magis-models=bert")
    grown = {f"{name}{at}": 99_000 - 999 * at for at, name in enumerate(HOSTILE)}
    refused = {"bert[magis-mem0.6]": {"raise": "".join(HOSTILE)}, "bert[eager]": {"crash": "\n".join(HOSTILE)}}
    notes = {"note": "".join(HOSTILE), "says": list(HOSTILE)}
    gate.fake(any_case={"held": grown, "opt_tensor": 1.01, **notes}, **refused)
    outputs = ("--magis-markdown=s.md", "--magis-report=r.html", "--magis-trace=t", "--junitxml=j.xml")
    run = gate("--magis-models=bert", *outputs, workers=workers)
    run.assert_outcomes(failed=3)
    ours = "\n".join(run.outlines).partition("= magis =")[2].splitlines()
    assert len([line for line in ours if line.startswith("::")]) == 3
    assert all(line.isprintable() for line in ours)
    (red,) = [line for line in run.outlines if line.startswith("grew at the peak: ")]
    assert can_only_be_read(red)
    assert "+95.70 KiB" in red
    assert "\\x1b[2J" in next(each["note"] for each in gate.rows() if each["memory limit ratio"] == "0.6")
    assert len(read_results(gate.root / "results.csv")) == 3
    assert Page((gate.root / "r.html").read_text(encoding="utf-8")).count("section") == 3
    assert "3 of 3 cases red" in (gate.root / "s.md").read_text(encoding="utf-8")
    ET.parse(gate.root / "j.xml")
    for path in (gate.root / "t").iterdir():
        assert json.loads(path.read_text(encoding="utf-8"))
