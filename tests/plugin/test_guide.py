"""docs/gate-my-model.md, followed to the letter."""

from __future__ import annotations

import re

from pytest_magis.live.test_options import TestOptions


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
    for name in TestOptions.__dataclass_fields__:
        assert f"`{name}`" in text
