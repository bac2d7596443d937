"""What it costs to have the plugin installed: next to nothing, as long as no case runs."""

from __future__ import annotations

HEAVY = ("torch", "numpy", "pandas", "numba", "rustworkx", "scipy")


def test_importing_the_plugin_loads_nothing_heavy(fresh_python):
    program = f"import sys, pytest_magis.plugin\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    assert fresh_python(program).split() == []


def test_an_idle_plugin_loads_none_of_the_gate(fresh_python):
    program = "import sys, pytest_magis.plugin\nprint(*sorted(name for name in sys.modules if 'magis' in name))"
    loaded = fresh_python(program).split()
    assert [name for name in loaded if not name.startswith("__editable__")] == [
        "pytest_magis", "pytest_magis.flags", "pytest_magis.hookspecs", "pytest_magis.lazy_activation",
        "pytest_magis.live", "pytest_magis.live.gated_tests", "pytest_magis.option_values", "pytest_magis.plugin",
    ]  # fmt: skip


def test_planning_a_run_on_cpu_loads_nothing_heavy(gate):
    gate.accept("--magis-models=bert")
    check = f"import sys\ndef pytest_unconfigure(): sys.stderr.write(str([m for m in {HEAVY!r} if m in sys.modules]))\n"
    (gate.root / "conftest.py").write_text(check)
    result = gate.in_subprocess("--magis-models=all", "--magis-device=cpu", "--collect-only", "-q")
    assert result.ret == 0
    assert result.stderr.str().strip() == "[]"
