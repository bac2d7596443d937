"""`magis.peak()`: bytes of any code, against counts made in another way, and where they are made."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import magis
from magis.runtime.measure import window_peak


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def network():
    return nn.Sequential(Cell(64), nn.Sequential(Cell(96), nn.Dropout(0.1)))


def train(net, x):
    net(x).square().sum().backward()
    for parameter in net.parameters():
        parameter.grad = None


def generate(net, x):
    for _ in range(5):
        x = net(x)
    return x


def inferred(net, x):
    with torch.inference_mode():
        return generate(net, x)


def unrecorded(net, x):
    with torch.no_grad():
        return generate(net, x)


@pytest.mark.parametrize("code", [train, generate, inferred, unrecorded])
def test_tensors_and_allocator_as_counted_by_the_allocators_own_log(code):
    net, x = network(), torch.randn(32, 16)
    code(net, x)
    kept = None
    with magis.peak("cpu") as p:
        kept = code(net, x)
    assert p.allocated_bytes == window_peak(lambda: code(net, x)).peak_bytes
    assert p.tensor_bytes == p.at_peak.tensor_bytes
    scratch = 32 * 16  # of dropout's mask: bytes of bool tensors are rounded by nobody
    assert abs(p.allocated_bytes - p.tensor_bytes) <= scratch
    expected = 0 if kept is None else kept.untyped_storage().nbytes()
    assert p.kept_bytes == expected if not (isinstance(kept, torch.Tensor) and kept.requires_grad) else p.kept_bytes > 0


def branch(x):
    return torch.cond(x.sum() > 1e9, lambda y: y.cos(), lambda y: (y * 2).sin() + 1, (x,))


def loop(x):
    def body(step, y):
        return step + 1, (y * 2).sin() * 3

    return while_loop(lambda step, _y: step < 3, body, (torch.tensor(0), x))[1]


def scanned(x):
    return scan(lambda carry, row: ((carry + row).sin(), (carry * row).cos()), torch.zeros(x.shape[1]), x)[1]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 256), nn.Dropout(), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False).sin()


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize(
    ("backend", "code", "seen"),
    [
        *((backend, code, 0.99) for backend in (None, "aot_eager", "inductor") for code in (branch, loop)),
        (None, scanned, 0.8),  # what a scan itself makes between its steps is the operator's own
        ("aot_eager", scanned, 0.8),
        ("aot_eager", Checkpointed, 0.69),  # scratch of a dropout in one operator is no tensor
        ("inductor", Checkpointed, 0.99),
        ("inductor", Cell, 0.99),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch's own while it compiles
def test_higher_order_operators_and_compiled_code_run_unharmed_and_are_seen(backend, code, seen, learns):
    if code is loop and learns:
        pytest.skip("torch has no gradient of an eager while_loop")
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = {Checkpointed: Checkpointed, Cell: lambda: Cell(64)}.get(code, lambda: code)()
    called = made if backend is None else torch.compile(made, backend=backend)
    x = torch.randn(512, 16 if code is Cell else 64, requires_grad=learns)

    def run():
        torch.manual_seed(1)
        x.grad = None
        out = called(x)
        if learns:
            out.sum().backward()
        return out.detach(), x.grad

    expected = run()
    for _ in range(2):  # compiled in the block, and before
        with magis.peak("cpu") as p:
            out = run()
        assert all(one is other or torch.equal(one, other) for one, other in zip(out, expected, strict=True))
    del expected, out
    assert 0 <= p.allocated_bytes - window_peak(run).peak_bytes <= 16  # single numbers live an operator longer
    assert seen * p.allocated_bytes <= p.tensor_bytes <= p.allocated_bytes


def test_compiled_code_allocates_as_before_once_the_block_has_ended():
    guards = torch._C._dynamo.guards
    before = guards._empty_strided_cpu
    with magis.peak("cpu"), magis.peak("cpu"):
        assert guards._empty_strided_cpu is not before
    assert guards._empty_strided_cpu is before


def test_a_sum_that_a_reader_can_check():
    a = torch.ones(1000)
    with magis.peak("cpu") as p:
        b = a + 1
        c = b + 1
        view = c[:10]
        del b
        d = view * 2
    assert (p.tensor_bytes, p.kept_bytes) == (8000, 4040)
    assert p.tensor_bytes <= p.allocated_bytes < p.tensor_bytes + 64  # numbers in Python become tensors of their own
    assert (p.at_peak.op, p.at_peak.module, p.reserved_bytes) == ("aten.add.Tensor", "", None)
    assert d.numel() == 10


def test_what_is_older_or_on_another_device_does_not_count():
    old = torch.empty(0)
    with magis.peak("cpu") as p:
        old.resize_(500)
        meta = torch.empty(10**6, device="meta") + 1
        small = torch.ones(7)
    assert (p.tensor_bytes, meta.shape, small.shape) == (28, (10**6,), (7,))


def test_rows_name_modules_and_lines():
    net, x = network(), torch.randn(32, 16)
    with magis.peak("cpu") as p:
        train(net, x)
    places = {(row.kind, row.module): row.line for row in p.at_peak.held}
    assert {"Sequential.0", "Sequential.1.0", "Sequential.1.1"} <= {module for _, module in places}
    lines = {line.rpartition(":")[0] for line in places.values() if line}
    assert lines == {"tests/api/test_block_peak.py"}
    assert "Sequential.1.0" in str(p)
    assert "peak of tensors" in str(p)


def test_blocks_within_blocks_and_after_errors():
    with magis.peak("cpu") as outer:
        with magis.peak("cpu") as inner:
            a = torch.ones(100)
        b = torch.ones(100)
    assert (inner.tensor_bytes, outer.tensor_bytes, inner.allocated_bytes) == (400, 800, None)
    with pytest.raises(ZeroDivisionError), magis.peak("cpu") as p:
        1 / 0  # noqa: B018
    with pytest.raises(magis.UsageError, match="no figures: its block raised ZeroDivisionError"):
        p.tensor_bytes  # noqa: B018
    with magis.peak("cpu") as p:
        c = a + b
    assert p.tensor_bytes == 400
    assert c.numel() == 100


def test_numbers_and_gradients_are_those_without_it():
    torch.manual_seed(0)
    net, x = network(), torch.randn(32, 16)

    def gradients():
        torch.manual_seed(1)
        net.zero_grad()
        net(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    expected = gradients()
    with magis.peak("cpu"):
        found = gradients()
    assert all(map(torch.equal, expected, found))


def test_a_peak_for_each_phase():
    kept = []
    with magis.peak("cpu") as p:
        kept.append(torch.ones(100))
        with magis.phase("training"):
            a = torch.ones(1000)
            with magis.phase("evaluation"):
                b = torch.ones(10)
            with pytest.raises(ZeroDivisionError), magis.phase("evaluation"):
                1 / 0  # noqa: B018
            a = b = None
            c = torch.ones(500)
        with magis.phase("idle"):
            pass
        torch.ones(50)
    assert p.phases == {"training": 4440, "evaluation": 4440, "idle": 2400}
    assert p.tensor_bytes == 4440
    assert "by phase: training 4.34 KiB, evaluation 4.34 KiB, idle 2.34 KiB" in str(p)
    assert (a, b, c.numel()) == (None, None, 500)


def test_phases_outside_of_blocks_and_around_them():
    @magis.phase("evaluation")
    def evaluate():
        with magis.peak("cpu") as p:
            torch.ones(10)
        return p

    assert [evaluate().phases for _ in range(2)] == [{"evaluation": 40}] * 2
    with magis.peak("cpu") as p:
        torch.ones(10)
    assert p.phases == {}
    for name in ("", "a b", 3):
        with pytest.raises(magis.UsageError, match=r"magis\.phase: the name is"), magis.phase(name):
            pass
    with pytest.raises(magis.UsageError, match="the name is a function"):
        magis.phase(evaluate)
    with pytest.raises(magis.UsageError, match="runs piece by piece"):

        @magis.phase("evaluation")
        def pieces():
            yield torch.ones(10)

    again = magis.phase("evaluation")
    with magis.peak("cpu") as p, again, again:
        torch.ones(10)
    assert p.phases == {"evaluation": 40}
    with pytest.raises(magis.UsageError, match="after= is no block"):
        magis.peak("cpu", after=3)


def test_a_phase_without_a_block_loads_nothing(fresh_python):
    program = "import sys, magis\nwith magis.phase('a'): print({'torch', 'numpy'} & set(sys.modules))"
    assert fresh_python(program) == "set()\n"


@pytest.mark.parametrize("zeroes", ["at the end", "at the beginning", "in place"])
def test_what_the_last_step_left_counts_where_it_is_freed(zeroes):
    net, x = network(), torch.randn(32, 16)
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        nonlocal last
        if zeroes != "at the end":
            optimizer.zero_grad(set_to_none=zeroes == "at the beginning")
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        if zeroes == "at the end":
            optimizer.zero_grad()
        last = loss  # with its graph

    def of_steps():
        step()
        with magis.phase("second"):
            step()

    last = None
    with magis.peak("cpu") as first:
        step()
    with magis.peak("cpu", after=first) as second:
        step()
    with magis.peak("cpu") as third:
        step()
    lasting = sum(each.nbytes for state in optimizer.state.values() for each in state.values())
    lasting += sum(each.grad.nbytes for each in net.parameters()) if zeroes == "in place" else 0
    optimizer.state.clear()
    optimizer.zero_grad()
    last = None
    with magis.peak("cpu") as both:
        of_steps()
    assert second.tensor_bytes == both.phases["second"] - lasting > third.tensor_bytes
    assert 0 <= second.allocated_bytes - second.tensor_bytes <= 32 * 16
    assert second.kept_bytes == third.kept_bytes
    assert any(row.kind == "carried over" for row in second.at_peak.held)
    assert "tensors of the last block, freed in this one" in str(second)
    assert last is not None
    with pytest.raises(magis.UsageError, match="after= is no block that has ended"):
        magis.peak("cpu", after=magis.peak("cpu"))


def test_a_block_after_one_that_leaves_nothing_is_one_by_itself():
    net, x = network(), torch.randn(32, 16)
    figures = []
    before = None
    for _ in range(3):
        with magis.peak("cpu", after=before) as p:
            train(net, x)
        figures.append((p.tensor_bytes, p.allocated_bytes, p.kept_bytes, p.at_peak))
        before = p
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_what_reference_cycles_keep_is_told(blocks):
    class Holds(nn.Module):
        def forward(self, x):
            found = {"output": x + 1}
            found["itself"] = found
            return found["output"]

    net = nn.Sequential(*(Holds() for _ in range(blocks)))
    with magis.peak("cpu") as p:
        kept = [net(torch.ones(1000)) for _ in range(2)]
    assert (p.kept_bytes, p.cyclic_bytes) == (8000 * blocks, 8000 * (blocks - 1))
    assert ("in reference cycles" in str(p)) == (blocks > 1)
    assert len(kept) == 2
    with magis.peak("cpu") as p:
        net(torch.ones(1000))
    assert p.kept_bytes == p.cyclic_bytes == 4000 * blocks
