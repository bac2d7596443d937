"""Saved plans: taken up without a search, for their own step alone; a strange file is one line, and runs nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from magis import UsageError, optimize
from tests.training.loops import BUDGET, assert_same, batch, loss_of, net


def saved(path: Path) -> Path:
    optimize(net(), loss_of, None, batch(), memory_ratio=0.9, budget=BUDGET).save(path)
    return path


def test_a_saved_plan_is_taken_up_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "plan.txt")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("magis.frontends.planned.plan", refuse)
    module = net()
    twin = copy.deepcopy(module)
    step = optimize(module, loss_of, None, batch(), memory_ratio=0.9, plan=path)
    loss_of(twin(batch()[0]), batch()[1]).backward()
    step(*batch())
    assert_same([p.grad for p in module.parameters()], [p.grad for p in twin.parameters()])
    assert step.report().memory_ratio <= 0.9
    again = tmp_path / "again.txt"
    step.save(again)
    assert again.read_bytes() == path.read_bytes()


def test_a_plan_of_another_step_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.txt")
    with pytest.raises(UsageError, match="the saved plan is of another step"):
        optimize(net(depth=5), loss_of, None, batch(), memory_ratio=0.9, plan=path)
    with pytest.raises(UsageError, match="the saved plan is of another step"):
        optimize(net(), loss_of, None, batch(48), memory_ratio=0.9, plan=path)


def test_a_file_whose_digest_was_changed_does_not_run(tmp_path: Path) -> None:
    """The digest says what a plan is for, and the graph is checked against the module's own tensors all the same."""
    path = saved(tmp_path / "plan.txt")
    other = net(width=16)
    step = optimize(other, loss_of, None, batch(width=16), memory_ratio=0.99, budget=BUDGET)
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = json.dumps({"digest": step.prepare(_batch(16)).plan.digest}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(
        UsageError, match=r"the saved plan works on parameter:0.weight as float32\[32, 32\], its step does not"
    ):
        optimize(other, loss_of, None, batch(width=16), memory_ratio=0.99, plan=path)


def _batch(width: int) -> object:
    from magis.capture.workload import as_batch

    return as_batch(batch(width=width))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan of this version"),
        ("magis plan 2\n{}\n", "is no plan of this version: it begins with 'magis plan 2'"),
        ("magis plan 1\n{", "is corrupt"),
        ("magis plan 1\n{}\nmagis graph 1\n", "is corrupt"),
        ("magis plan 1\n" + "[" * 100_000, "is corrupt"),
        ('magis plan 1\n{"digest": "x"}\nnothing', "is corrupt"),
        ('magis plan 1\n{"digest": NaN}\nmagis graph 1\nstorage 0 temporary -5\n', "is corrupt"),
        ('magis plan 1\n{"digest": "x"}\nmagis graph 1\nstorage 9' + "9" * 5000 + " temporary 4\n", "is corrupt"),
    ],
)
def test_strange_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        optimize(net(), loss_of, None, batch(), memory_ratio=0.9, plan=path)
    assert "\n" not in str(error.value)
    assert path.read_text() == text


def test_an_operator_that_no_step_has_is_refused(tmp_path: Path) -> None:
    """`aten.from_file` would open files; the text form can say it, so the reader must not take it."""
    path = saved(tmp_path / "plan.txt")
    path.write_text(path.read_text().replace("aten.addmm.default(", "aten.from_file.default("))
    with pytest.raises(UsageError, match=r"holds aten.from_file.default, which its step has not"):
        optimize(net(), loss_of, None, batch(), memory_ratio=0.9, plan=path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the plan .*: No such file"):
        optimize(net(), loss_of, None, batch(), memory_ratio=0.9, plan=tmp_path / "none.txt")
    assert torch.is_grad_enabled()
