"""What moved although the step did not is listed by the run and renewed by a command; who planned is in the row."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_the_run_lists_what_moved_and_the_command_renews_it(gate, workers):
    gate.fake(any_case={"planner": "p1"})
    gate.accept("--magis-models=bert")
    gate.fake(any_case={"planner": "p2", "opt_tensor": 1.005})
    result = gate("--magis-models=bert", "--magis-markdown=run.md", workers=workers)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "bert * mem 0.8 * pass, moved",
            "bert[[]magis-mem0.8]: moved: optimized tensor bytes: 983,364 *, allowed 978,472 *%: moved by the planner",
            "accept everything that can be: pytest --magis-models=bert --magis-update=moved",
        ]
    )
    gate("--magis-models=bert", "--magis-update=moved", workers=workers).assert_outcomes(passed=3)
    assert gate.baseline()["configurations"]["small"]["cases"]["magis-mem0.8"]["planner"] == "p2"
    gate("--magis-models=bert").assert_outcomes(passed=3)
    assert {row["verdict"] for row in gate.rows()} == {"pass"}


def test_a_row_says_which_code_planned_it_and_a_change_of_that_code_shows(repository, tmp_path):
    """The planner's version is a digest of its sources: it notices every change, and no plan moves without one."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from magis.report.text_store import code_digest; print(code_digest())"
    )

    def digest(folder):
        command = [sys.executable, "-c", program, str(folder)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    for path in (repository / "magis").rglob("*.py"):
        copy = tmp_path / "copy" / path.relative_to(repository)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    same = digest(repository)
    assert digest(tmp_path / "copy") == same
    changed = tmp_path / "copy" / "magis" / "search" / "driver.py"
    changed.write_text(changed.read_text() + "FROM_NOTHING //= 2\n")
    assert digest(tmp_path / "copy") != same


def test_the_gate_runs_with_the_threads_that_a_user_has(repository, tmp_path):
    """Although the tests' own settings lie in the folder that it collects."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(repository), "PYTEST_ADDOPTS": "-p no:cacheprovider"}

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    threads = run("-c", "import torch; print(torch.get_num_threads())").strip()
    csv = tmp_path / "rows.csv"
    run("-m", "pytest", "--magis-models=mlp", "--magis-strategies=eager", "--magis-update=new",
        f"--magis-baselines={tmp_path / 'baselines'}", f"--magis-csv={csv}", "--magis-csv-full")  # fmt: skip
    assert f"threads={threads}," in csv.read_text()
    (path,) = (tmp_path / "baselines").rglob("*.json")
    assert f"threads={threads}," in json.dumps(json.loads(path.read_text()))
