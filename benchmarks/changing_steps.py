"""What a step costs whose numbers or sizes change: `magis.optimize` beside eager, in CPU time, with eager's bits.

    python benchmarks/changing_steps.py [ROW ...] [--steps N]

Every row trains a small net twice, planned and in eager mode, and changes something before each step. Printed are CPU
milliseconds a step in the second half, once what repeats has been met; of all steps the captures and searches after the
first plan; and, where the last half of the steps has new sizes, the CPU time of a step that brings one.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lib.program import arguments, head, printed
from torch import Tensor, nn
from torch.nn import functional

import magis
from magis.frontends import planned
from magis.planner import planning


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * gradient, None


class Net(nn.Module):
    """Two layers with something between them that takes numbers."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(16, 64), nn.Linear(64, 5), between
        self.number, self.weights = 1.0, {"first": 1.0, "second": 0.3}
        self.center = torch.zeros(64)
        self.register_buffer("queue", torch.zeros(320, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.between(self, torch.tanh(self.one(x)))
        out: Tensor = self.two(hidden)
        return out


def annealed(net: Net, step: int) -> None:
    """From 1 down to 0.1."""
    net.number = max(0.1, 0.99**step)


def raised(net: Net, step: int) -> None:
    """From 0 up to 1."""
    net.number = min(1.0, step / 100)


def weighted(net: Net, step: int) -> None:
    """Two weights of a loss that follow a schedule of their own each."""
    net.weights.update(first=0.9 * 0.98**step + 0.05, second=0.3 + 0.003 * step)


def divergence(net: Net, hidden: Tensor) -> Tensor:
    """A sampled layer; what stands for its divergence goes into the loss by a weight."""
    mean, spread = hidden.chunk(2, -1)
    sampled = mean + torch.randn_like(mean) * torch.exp(spread / 2)
    return torch.cat((sampled, net.number * (mean.pow(2) + spread.exp() - spread - 1)), -1)


def mixed(_net: Net, hidden: Tensor) -> Tensor:
    """Mixup of what a layer gives, with a share drawn on the host."""
    share = random.betavariate(0.4, 0.4)
    return share * hidden + (1 - share) * hidden.flip(0)


def counted(net: Net, hidden: Tensor) -> Tensor:
    """A weight that a counter of the forward's own warms up."""
    net.number += 1.0
    return hidden * (net.number / (net.number + 50))


def centered(net: Net, hidden: Tensor) -> Tensor:
    """A running centre, replaced by every forward."""
    shifted = hidden - net.center
    net.center = net.center * 0.9 + hidden.detach().mean(0) * 0.1
    return shifted


def queued(net: Net, hidden: Tensor) -> Tensor:
    """Keys of the last batches in a ring, whose place is a buffer."""
    start = int(net.place)
    net.queue[start : start + 32] = hidden.detach()
    net.place[0] = (start + 32) % 320
    return hidden + net.queue.mean(0)


def checked(net: Net, hidden: Tensor) -> Tensor:
    """A check of a number read off integers."""
    if int(net.place.max()) >= 320:
        raise ValueError("out of range")
    return hidden


@dataclass(frozen=True)
class Row:
    """What stands between the layers, what changes before each step, and how large its batch is."""

    between: Callable[[Net, Tensor], Tensor] = lambda _net, hidden: hidden
    change: Callable[[Net, int], None] = lambda _net, _step: None
    size: Callable[[int], int] = lambda _step: 32


OTHER = torch.optim.SGD([torch.zeros(1)], lr=0.9)
LENGTHS = random.Random(0).sample(range(8, 200), 40)
ROWS = {
    "annealed temperature": Row(lambda net, hidden: hidden / net.number, annealed),
    "weight of a divergence": Row(divergence, raised),
    "gradient reversal": Row(lambda net, hidden: Reversed.apply(hidden, net.number), raised),
    "weights in a dictionary": Row(
        lambda net, hidden: net.weights["first"] * hidden + net.weights["second"] * hidden.pow(2), weighted
    ),
    "annealed dropout": Row(lambda net, hidden: functional.dropout(hidden, net.number / 2), annealed),
    "drawn on the host": Row(mixed),
    "counter of the forward": Row(counted),
    "replaced centre": Row(centered),
    "ring of keys": Row(queued),
    "check of a number": Row(checked, lambda net, step: net.place.fill_(step)),
    "rate of another optimizer": Row(
        lambda _net, hidden: hidden * OTHER.param_groups[0]["lr"],
        lambda _net, step: OTHER.param_groups[0].update(lr=0.9 * 0.99**step),
    ),
    "six batch sizes in turn": Row(size=lambda step: 8 + 2 * (step % 6)),
    "40 random lengths": Row(size=lambda step: LENGTHS[step % 40]),
}


def line(name: str, row: Row, steps: int) -> str:
    """A row of the table. RuntimeError where a number is not eager's."""
    torch.manual_seed(0)
    ours = Net(row.between)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (ours, theirs)]
    batches = [(torch.randn(row.size(step), 16), torch.randint(0, 5, (row.size(step),))) for step in range(steps)]
    for net in (ours, theirs):
        row.change(net, 0)
    step = magis.optimize(ours, batches[0], functional.cross_entropy, optimizers[0], latency_ratio=1.5, budget=40)
    counts, spent, anew = {"captured_step": 0, "_search_all": 0}, [0.0, 0.0], list[float]()

    def counting(module: Any, called: str) -> None:
        function = getattr(module, called)

        def counted(*args: Any, **names: Any) -> Any:
            counts[called] += 1
            return function(*args, **names)

        setattr(module, called, counted)

    counted = ((planned, "captured_step"), (planning, "_search_all"))
    originals = [getattr(*each) for each in counted]
    for each in counted:
        counting(*each)
    try:
        for index, (x, y) in enumerate(batches):
            for net in (ours, theirs):
                row.change(net, index)
            before = counts["captured_step"]
            torch.manual_seed(index)
            random.seed(index)
            started = time.process_time()
            loss = step(x, y)
            took = time.process_time() - started
            torch.manual_seed(index)
            random.seed(index)
            started = time.process_time()
            optimizers[1].zero_grad()
            eager = functional.cross_entropy(theirs(x), y)
            eager.backward()
            optimizers[1].step()
            if index >= steps // 2:
                spent[0] += took
                spent[1] += time.process_time() - started
            if counts["captured_step"] > before:
                anew.append(took)
            pairs = [(loss, eager), *zip(ours.parameters(), theirs.parameters(), strict=True)]
            if not all(torch.equal(a, b) for a, b in pairs):
                raise RuntimeError(f"{name}: another number at step {index}")
    finally:
        for (module, called), function in zip(counted, originals, strict=True):
            setattr(module, called, function)
    mine, other = (1e3 * each / (steps - steps // 2) for each in spent)
    dear = f"{1e3 * sorted(anew)[len(anew) // 2]:.0f}" if anew else "-"
    times = f"{name:26}{mine:8.2f}{other:8.2f}{mine / other:8.2f}"
    return f"{times}{counts['captured_step']:10}{counts['_search_all']:10}{dear:>12}"


def lines(names: list[str], steps: int) -> Iterator[str]:
    """The table."""
    yield from head("one thread")
    yield f"{'':26}{'ours':>8}{'eager':>8}{'ratio':>8}{'captures':>10}{'searches':>10}{'anew, ms':>12}"
    for name in names or ROWS:
        yield line(name, ROWS[name], steps)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=120)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    printed(lines(asked.names, asked.steps))
