"""README.md and docs/gate-my-model.md, followed to the letter."""

from __future__ import annotations

import re

from pytest_magis.live.asked_options import AskedOptions


def test_the_guide_works(gate, repository):
    gate.use_real_core()
    text = (repository / "docs" / "gate-my-model.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["test_memory.py", "test_blocks.py", "conftest.py"]
    for name, content in files:
        (gate.root / name).write_text(content, encoding="utf-8")
    gate().assert_outcomes(failed=3)
    gate("--magis-update=new").assert_outcomes(passed=3)
    assert (gate.root / "baselines" / "cpu" / "test_memory.test_classifier.json").is_file()
    # timings of a busy machine are not what this test is about
    gate("--magis-latency-tolerance=9").assert_outcomes(passed=3)
    assert "no package 'my_package'" in gate.refuses("--magis-models=classifier")


def test_it_names_all_that_a_mark_takes(repository):
    text = (repository / "docs" / "gate-my-model.md").read_text(encoding="utf-8")
    for name in AskedOptions.__dataclass_fields__:
        assert f"`{name}`" in text


def test_the_readme_works(gate, repository):
    """Its test is gated as it stands; with the change that it suggests the gate is red, in the lines that it shows."""
    gate.use_real_core()
    text = (repository / "README.md").read_text(encoding="utf-8")
    ((name, program),) = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^\$ pytest (\S+)(?: (--\S+))?", text, re.MULTILINE)
    assert commands == [(name, "--magis-update=new"), (name, "")]
    (gate.root / name).write_text(f"# {name}\n{program}", encoding="utf-8")
    gate(*commands[0], "--magis-latency-tolerance=9").assert_outcomes(passed=2)
    gate(name, "--magis-latency-tolerance=9").assert_outcomes(passed=2)
    assert "`Block(64, 384)`" in text
    wider = program.replace("Block(64, 256)", "Block(64, 384)", 1)
    (gate.root / name).write_text(f"# {name}\n{wider}", encoding="utf-8")
    result = gate(name)
    result.assert_outcomes(failed=2)
    (shown,) = re.findall(r"^```\n(_+ test_my_model\[eager\].*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(shown.splitlines()) == 5
    printed = {line.strip("_ ") for line in result.outlines}  # a heading is as wide as the terminal
    assert [line for line in shown.splitlines() if line.strip("_ ") not in printed] == []
