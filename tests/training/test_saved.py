"""Saved plans: taken up without a search, for their own step alone; a strange file is one line, and runs nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from magis import MagisError, UsageError, optimize
from magis.capture.optimizer_rule import update_of
from magis.capture.workload import as_batch
from magis.frontends.plan_files import read_plan, write_plan
from magis.frontends.planned import subject_now
from magis.graph import Graph, dump, parse
from magis.planner.kept_plans import verify_plan
from magis.planner.plan_proof import prove
from magis.planner.subject import Subject
from magis.report.text_store import UNSOUND
from tests.golden.golden import HERE
from tests.training.loops import BUDGET, assert_same, batch, loss_of, net
from tests.training.plan_mutants import mutants, recounted


def saved(path: Path, memory_ratio: float = 0.9) -> Path:
    optimize(net(), batch(), loss_of, None, memory_ratio=memory_ratio, budget=BUDGET).save(path)
    return path


def written(body: str, **head: object) -> str:
    """The text of a file with the right checksum."""
    known = {"checksum": hashlib.sha256(body.encode()).hexdigest(), "digest": "x", "limit": {}}
    return f"magis plan 2\n{json.dumps(known | head)}\n{body}"


def test_a_saved_plan_is_taken_up_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "plan.txt")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("magis.frontends.planned.plan", refuse)
    module = net()
    twin = copy.deepcopy(module)
    step = optimize(module, batch(), loss_of, None, memory_ratio=0.9, plan=path)
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
        optimize(net(depth=5), batch(), loss_of, None, memory_ratio=0.9, plan=path)
    with pytest.raises(UsageError, match="the saved plan is of another step"):
        optimize(net(), batch(48), loss_of, None, memory_ratio=0.9, plan=path)


def test_another_limit_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.txt")
    for asked in ({"memory_ratio": 0.6}, {"memory_limit": "1 GiB"}, {"latency_ratio": 1.1}):
        with pytest.raises(UsageError, match=r"made for memory_ratio=0.9, asked for is .*; pass memory_ratio=0.9"):
            optimize(net(), batch(), loss_of, None, plan=path, **asked)


def test_a_plan_that_needs_more_here_than_its_limit_is_refused(tmp_path: Path) -> None:
    """As one that was made where operators have less scratch."""
    path = saved(tmp_path / "plan.txt", memory_ratio=0.99)
    write_plan(path, replace(read_plan(path), limit={"memory_ratio": 0.7}))
    with pytest.raises(UsageError, match=r"the saved plan needs .* here, the limit is .*; leave out plan="):
        optimize(net(), batch(), loss_of, None, memory_ratio=0.7, plan=path)


def test_a_file_whose_digest_was_changed_does_not_run(tmp_path: Path) -> None:
    """The digest says what a plan is for, and the graph is proven to compute the step all the same."""
    path = saved(tmp_path / "plan.txt")
    other = net(width=16)
    step = optimize(other, batch(width=16), loss_of, None, memory_ratio=0.9, budget=BUDGET)
    write_plan(path, replace(read_plan(path), digest=step.prepare(as_batch(batch(width=16))).plan.digest))
    with pytest.raises(UsageError, match="the saved plan does not compute this step: "):
        optimize(other, batch(width=16), loss_of, None, memory_ratio=0.9, plan=path)


def test_a_changed_file_is_told_by_its_checksum(tmp_path: Path) -> None:
    path = saved(tmp_path / "plan.txt")
    path.write_text(path.read_text().replace(" float32 [32, 32]", " float64 [32, 32]"))
    with pytest.raises(UsageError, match="was changed since it was saved: its checksum is another one"):
        optimize(net(), batch(), loss_of, None, memory_ratio=0.9, plan=path)


# Plans with one thing changed, in files whose checksums are right: what is not refused computes the same numbers.


class Everything(nn.Module):
    """Writes in place, statistics, random numbers, a counter, a constant: all that a plan may treat in its own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(4, 5)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, images: Tensor) -> Tensor:
        kept = torch.relu_(self.norm(self.first(images)))
        kept = kept + nn.functional.dropout(kept, 0.3)
        kept = self.second(kept) * torch.tensor([2.0, 3.0, 1.0, 1.0]).view(1, 4, 1, 1)
        self.steps.add_(1)
        return self.last(kept.mean((2, 3)))


def images(seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(6) % 5


class Whole:
    """A step, its saved plan, and what two steps by it leave."""

    def __init__(self, path: Path, make: Callable[[], nn.Module], data: Any, loss_fn: Any, ratio: float) -> None:
        self.path, self.make, self.data, self.loss_fn, self.ratio = path, make, data, loss_fn, ratio
        module, loss_fn, optimizer = self.parts()
        step = optimize(module, data(), loss_fn, optimizer, memory_ratio=ratio, budget=BUDGET)
        self.looped = bool(step.report().fission)
        step.save(path)
        self.plan = read_plan(path)
        self.left = self.trained()

    def parts(self) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        module = self.make()
        return module, self.loss_fn, torch.optim.AdamW(module.parameters(), lr=0.1)

    def subject(self) -> Subject:
        module, loss_fn, optimizer = self.parts()
        rule = update_of(optimizer, dict(module.named_parameters())).spec
        return subject_now(module, loss_fn, as_batch(self.data()), rule, "cpu", None)

    def trained(self) -> list[Tensor]:
        module, loss_fn, optimizer = self.parts()
        step = optimize(module, self.data(), loss_fn, optimizer, memory_ratio=self.ratio, plan=self.path)
        for seed in range(2):
            torch.manual_seed(seed)
            step(*self.data(seed))
        return [*module.state_dict().values(), torch.get_rng_state()]

    def check(self, graph: Graph) -> bool:
        """Whether a graph is refused; one that is not computes what the plan computes."""
        write_plan(self.path, replace(self.plan, graph=graph))
        try:
            found = self.trained()
        except UsageError:
            return True
        for one, other in zip(found, self.left, strict=True):
            assert torch.allclose(one, other, rtol=1e-4) if self.looped else torch.equal(one, other)
        return False


PLANS = {
    "everything": (Everything, images, nn.functional.cross_entropy, 0.92),
    "loops": (lambda: net(16, 6), lambda seed=0: batch(256, 16, seed), loss_of, 0.38),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_changed_plan_is_refused_or_computes_the_same(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path / "plan.txt", *PLANS[name])
    assert whole.looped == (name == "loops")
    subject, chosen = whole.subject(), random.Random(0)
    verify_plan(whole.plan.graph, subject)
    taken, refused = [], Counter[str]()
    for kind, mutant in chosen.sample(list(mutants(whole.plan.graph)), 250):
        try:
            graph = parse(dump(mutant))
            verify_plan(graph, subject)
            taken.append(graph)
        except MagisError:
            refused[kind] += 1
    assert len(taken) < 100 < refused.total()
    assert not {"drop", "literal", "operator", "other", "names"} - refused.keys()
    for graph in chosen.sample(taken, 3):  # one in another order may need more than the limit, which is another line
        whole.check(graph)


def test_what_trains_other_numbers_is_refused(tmp_path: Path) -> None:
    """The update of one weight left out, two weights in each other's place, another constant."""
    whole = Whole(tmp_path / "plan.txt", *PLANS["everything"])
    graph = whole.plan.graph
    update = [op for op in graph.ops if op.phase == "update" and op.writes][-1]
    assert whole.check(recounted(replace(graph, ops=tuple(op for op in graph.ops if op is not update))))
    one, other = (v for v in graph.values.values() if v.name in ("parameter:first.bias", "parameter:second.bias"))
    swapped = {one.id: replace(one, name=other.name), other.id: replace(other, name=one.name)}
    assert whole.check(replace(graph, values=graph.values | swapped))
    ((constant, numbers),) = graph.constants.items()
    assert whole.check(replace(graph, constants={constant: (*numbers[:-1], 7.0)}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no plan of this version"),
        ("magis plan 1\n{}\n", "is no plan of this version: it begins with 'magis plan 1'"),
        ("magis plan 2\n{", "is corrupt"),
        ("magis plan 2\n{}\nmagis graph 1\n", "is corrupt"),
        ("magis plan 2\n" + "[" * 100_000, "is corrupt"),
        *(
            (written(body), "is corrupt")
            for body in (
                "nothing",
                "magis graph 1\nstorage 0 temporary -5\n",
                f"magis graph 1\nstorage 9{'9' * 5000} temporary 4\n",
                f"magis graph 1\nstorage 0 temporary {10**19}\n",
                "magis graph 1\nop 0 %1 = aten.mm.default(%1, %1) phase forward\n",
                "magis graph 1\nstorage 0 batch 4\nvalue 0 @0 float32 [-1] {1} +0\ninput 0\n",
                "magis graph 1\n" + "op 0 = magis.loop() phase forward parts 2\n" * 30,
            )
        ),
        (written("magis graph 1\n", limit=[1]), "is corrupt"),
        (written("magis graph 1\n", digest=5), "is corrupt"),
    ],
)
def test_strange_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        optimize(net(), batch(), loss_of, None, memory_ratio=0.9, plan=path)
    assert "\n" not in str(error.value)
    assert path.read_text() == text


def test_an_operator_that_no_step_has_is_refused(tmp_path: Path) -> None:
    """`aten.from_file` would open files; the text form can say it, so the reader must not take it."""
    path = saved(tmp_path / "plan.txt")
    graph = parse(dump(read_plan(path).graph).replace("aten.addmm.default(", "aten.from_file.default("))
    write_plan(path, replace(read_plan(path), graph=graph))
    with pytest.raises(UsageError, match=r"holds aten.from_file.default, which its step has not"):
        optimize(net(), batch(), loss_of, None, memory_ratio=0.9, plan=path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the plan .*: No such file"):
        optimize(net(), batch(), loss_of, None, memory_ratio=0.9, plan=tmp_path / "none.txt")
    assert torch.is_grad_enabled()


LINES = (HERE / "mlp_graph.txt").read_text(encoding="utf-8").splitlines()
WORDS = (
    *("", "%0", "%99999", "[", "]", "[-1]", "{0}", "-5", "nan", "_", "=", "0:1", "end", "\0", str(10**18), str(10**30)),
    "parts 2", "<dtype float99>",
    '"\\ud800"', "magis.loop()", "magis.wait(%1)", "aten.as_strided.default(%1, [9], [9], 9)",
)  # fmt: skip


@given(data=st.data())
def test_lines_changed_at_random_are_one_line(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every file, however it was changed, is a legal graph or one line; the checksum is made right."""
    path = tmp_path_factory.mktemp("plans") / "plan.txt"
    lines = LINES[:]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        words = lines[at].split(" ")
        word = data.draw(st.integers(0, len(words) - 1))
        words[word] = data.draw(st.sampled_from(WORDS) | st.text(max_size=4))
        lines[at] = data.draw(st.sampled_from([" ".join(words), lines[at] * 2, "", *LINES[:3], lines[-1 - at]]))
    text = written("\n".join(lines[: data.draw(st.integers(1, len(lines)))]) + "\n")
    path.write_bytes(text.encode(errors="surrogatepass"))
    graph = None
    with suppress(MagisError):
        graph = read_plan(path).graph
    if graph is not None:
        with suppress(*UNSOUND):  # of which `verify_plan` makes one line
            prove(graph, parse("\n".join(LINES)))
