"""`--magis-report`: one page that opens offline, whatever the names in it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from urllib.parse import unquote

import pytest

from pytest_magis.outputs.html.page_parts import MOST, history
from tests.plugin.pages import Page

EVIL = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>"
HELD = {"layers.0.up": 6000, EVIL: 3000, "": 1000}
RUN = ("--magis-models=bert", "--magis-report=report.html")


def page_of(gate) -> Page:
    return Page((gate.root / "report.html").read_text(encoding="utf-8"))


def commit(gate, subject: str) -> None:
    git = ["git", "-C", str(gate.root), "-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "baselines"], ["commit", "-q", "-m", subject]):
        subprocess.run([*git, *words], check=True, capture_output=True)


def test_the_page_has_the_table_and_all_that_is_known_of_every_case(gate, workers):
    gate.fake(any_case={"held": HELD})
    gate.accept("--magis-models=bert")
    commit(gate, f"store {EVIL}")
    grown = {"layers.0.up": 9000, EVIL: 3000, "": 1000}
    gate.fake(any_case={"held": HELD}, **{"bert[magis-mem0.8]": {"held": grown, "opt_tensor": 1.01}})
    result = gate(*RUN, "--magis-pareto=fronts", workers=workers)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines([f"report: {gate.root / 'report.html'}"])
    page = page_of(gate)
    assert page.count("script") == 2
    assert page.count("img") == 1  # the front
    assert [each["data-view"] for _, each in page.tags if each.get("class") == "viewer"] == ["0", "1", "2"]
    for words in (
        "magis: 1 of 3 cases red",
        "bert magis mem 0.8 1.18 MiB",
        "grew at the peak: layers.0.up +2.93 KiB (1 activation at net.py:7); the peak is at aten.mm.default of layers",
        "Accept with: pytest --magis-models=bert --magis-strategies=magis --magis-memory-ratios=0.8 --magis-update=",
        "Tensors at the peak of the optimized step: 12.70 KiB, at aten.mm.default of layers.0.up (forward, net.py:7)",
        EVIL,
        f"store {EVIL}",
        "(no sub-module) activation net.py:7 1 1000 B",
    ):
        assert words in page.text, words
    assert page.text.count("--magis-report") == 1  # in the command of the run, and in none that accepts
    assert "device cpu (avx512) torch " in page.text
    assert re.search(rf" command pytest .*{re.escape(shlex.join(RUN))} --magis-pareto=fronts", page.text)
    assert page.text.count("Tensors at the peak of the original step") == 3
    assert page.text.count("As with bert[eager].") == 1  # its table stands once; one case differs


def test_every_step_is_in_the_data_once_with_all_calls(gate):
    gate.fake(any_case={"held": HELD})
    gate.accept("--magis-models=bert")
    gate(*RUN).assert_outcomes(passed=3)
    text = (gate.root / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    peak = gate.rows()[0]["ori peak bytes"]
    found = json.loads(data)
    assert [view["names"] for view in found["views"]] == [["original"], *[["original", "optimized"]] * 2]
    assert {at for view in found["views"] for at in view["steps"]} == set(range(len(found["steps"])))
    (step,) = found["steps"]  # the made-up steps are all the same
    assert max(step["scratch"]) + sum(step["nbytes"]) == int(peak)
    assert EVIL not in text


def test_files_of_a_case_are_linked_where_they_exist(gate):
    gate.fake(any_case={"held": HELD})
    gate.accept("--magis-models=bert")
    gate(*RUN, "--magis-trace=the traces").assert_outcomes(passed=3)
    links = [each["href"] for tag, each in page_of(gate).tags if tag == "a" and not each["href"].startswith("#")]
    assert len(links) == 3
    assert all((gate.root / unquote(link)).is_file() for link in links)


def test_red_cases_of_every_kind_have_their_place(gate, workers):
    gate.accept("--magis-models=bert,vit", "--magis-strategies=eager")
    gate.fake(
        **{
            "bert[eager]": {"raise": f"cannot be captured {EVIL}\nat all"},
            "bert[magis-mem0.8]": {"feasible": False, "lower_bound": 0.9},
            "bert[magis-mem0.6]": {"crash": "boom"},
        }
    )
    result = gate("--magis-models=bert,vit", "--magis-report=report.html", workers=workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    page = page_of(gate)
    assert "error: cannot be captured </script>" in page.text
    assert "RuntimeError: boom" in page.text
    assert "infeasible, proven" in page.text
    assert page.text.count("It has no result to show.") == 2
    assert page.text.count("Whoever ran this case gave no time lines.") == 4
    assert page.count("svg") == 0


def test_an_interrupted_run_says_so_and_shows_what_it_has(gate):
    gate.accept("--magis-models=bert")
    gate.fake(**{"bert[magis-mem0.6]": {"interrupt": True}})
    result = gate.in_subprocess(*RUN)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "The run was interrupted: 2 of 3 cases ran." in page_of(gate).text


# --- history ----------------------------------------------------------------------------------------------------------


def test_history_is_bounded_and_leaves_out_what_cannot_be_read(gate, monkeypatch):
    gate.accept("--magis-models=bert")
    path = gate.root / "baselines/cpu/bert.json"
    assert history(path) == ()  # no repository
    good = path.read_text()
    for number in range(MOST + 3):
        path.write_text(good.replace('"g1"', f'"g{number}"') if number != MOST else "no baseline")
        commit(gate, f"number {number}")
    found = history(path)
    assert [each.subject for each in found[:2]] == [f"number {MOST + 2}", f"number {MOST + 1}"]
    assert len(found) == MOST - 1
    monkeypatch.setenv("PATH", "")
    assert history(path) == ()  # no git


def test_only_commits_that_changed_the_case_are_shown(gate):
    gate.accept("--magis-models=bert")
    commit(gate, "first")
    path = gate.root / "baselines/cpu/bert.json"
    before = path.read_text()
    path.write_text(before.replace('"g1"', '"g2"'))
    commit(gate, "same bytes")
    gate.fake(any_case={"ori_tensor": 1.01, "opt_tensor": 1.01})
    gate.accept("--magis-models=bert", update="worse,better")
    commit(gate, "grew")
    gate(*RUN).assert_outcomes(passed=3)
    text = page_of(gate).text
    assert (text.count("first"), text.count("same bytes"), text.count("grew")) == (3, 0, 3)
