"""Random training steps: a module of ten or twenty statements, its batch, its loss and its optimizer."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.fuzz.functions import PRELUDE
from tests.fuzz.judge import Seen, trains
from tests.fuzz.maker import DTYPES, Maker
from tests.fuzz.operators import HOST
from tests.fuzz.script import Script, shortened

__all__ = ["drawn_program"]

LIMITS = (
    ("memory_ratio", 1.0),
    ("memory_ratio", 0.9),
    ("memory_ratio", 0.8),
    ("memory_ratio", 0.6),
    ("memory_ratio", 0.6),
    ("latency_ratio", 1.05),
    ("latency_ratio", 3.0),
    ("latency_ratio", 3.0),
)
OPTIMIZERS = (
    "torch.optim.SGD(model.parameters(), lr=0.01)",
    "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
    "torch.optim.Adam(model.parameters(), lr=0.01)",
    "torch.optim.AdamW(model.parameters(), lr=0.01)",
    "torch.optim.AdamW(model.parameters(), lr=0.01)",
    "torch.optim.RMSprop(model.parameters(), lr=0.001)",
    "None",
)
EVENTS = ("step(0)", "step(1)", "step(2)")
ALIASES = ("x0", "x0.clone()", "x0[1:]", "x0.transpose(0, 1)", "x0[:1].expand_as(x0)", "x0.flatten()")
LOSSES = (
    "out.square().mean()",
    "out.sum()",
    "out.abs().mean() * 3",
    "(out ** 2).sum() / 2",
    "out.flatten().norm()",
    "out.logsumexp(-1).mean()",
    "F.smooth_l1_loss(out, torch.zeros_like(out))",
    "out.std()",
    "F.huber_loss(out, torch.ones_like(out), reduction='sum')",
    "F.mse_loss(out.flatten(), torch.linspace(0, 1, out.numel(), dtype=out.dtype))",
    "F.binary_cross_entropy_with_logits(out, torch.full_like(out, 0.3))",
    "out.mean() * 0.5",
    "F.kl_div(F.log_softmax(out, -1), torch.full_like(out, 0.1), reduction='sum')",
    "nn.MSELoss(reduction='sum')(out, torch.zeros_like(out))",
    "F.cosine_embedding_loss(out.reshape(1, -1), out.detach().flip(0).reshape(1, -1), torch.ones(1))",
    "F.cross_entropy(out, t0)",
    "nn.CrossEntropyLoss(weight=torch.arange(1.0, out.shape[1] + 1))(out, t0)",
    "F.nll_loss(F.log_softmax(out, 1), t0)",
    "F.multi_margin_loss(out, t0)",
    "-F.logsigmoid(out).mean()",
)
OF_COMPLEX = (
    "(out.abs() ** 2).mean()",
    "torch.view_as_real(out).square().sum()",
    "out.real.sum() + out.imag.mean()",
    "(out * out.conj()).real.mean()",
)
SELDOM = 0.004


def drawn_program(seed: int) -> tuple[Script, list[Seen]]:
    """The program of a seed, and what eager mode makes of it. Draws again until there is one that trains."""
    for attempt in range(200):
        script = _script(random.Random(1000 * seed + attempt))
        seen = _settled(script) if script else None
        if seen is not None:
            return seen
    raise RuntimeError(f"no program for seed {seed}")


def _settled(script: Script) -> tuple[Script, list[Seen]] | None:
    """A script that trains: without its in-place statements, last first, where these spoil the backward."""
    for _ in range(4):
        seen = trains(script)
        if seen is not None:
            return script, seen
        spoilers = [n for n, line in enumerate(script.forward) if ("_(" in line and " = " not in line) or "] =" in line]
        if not spoilers:
            return None
        gone = spoilers[-1]
        script = shortened(script, "forward", lambda number, gone=gone: number != gone)  # type: ignore[misc]
    return None


def _script(chance: random.Random) -> Script | None:
    """A program at random."""
    torch.manual_seed(chance.randrange(2**31))
    dtype = chance.choice(DTYPES)
    lines, takes, targets = _batch(chance, dtype)
    space: dict[str, Tensor] = {}
    for line in lines:
        exec(line, {"torch": torch}, space)
    maker = Maker(chance, dtype, {name: space[name] for name in takes}, mixed=chance.random() < 0.15)
    if chance.random() < 0.25:  # an attribute that counts calls
        maker.init.append("self.calls = 0")
    maker.extend(chance.randint(5, 20))
    if chance.random() < SELDOM:
        maker.add(chance.choice(HOST.strip().splitlines()), "host")
    loss = _loss(chance, maker, len(space["t0"]) if targets else -1)
    if loss is None:
        return None
    result, expression = loss
    init = maker.init
    text = "\n".join((*maker.forward, result))
    if "self.calls" in text and "self.calls = 0" not in init:
        init.append("self.calls = 0")
    prelude = tuple(PRELUDE[name] for name in PRELUDE if f"{name}.apply" in text)
    init += _extras(chance, maker)
    setup = ["model = Net()"]
    if chance.random() < 0.12:
        setup.append("model.eval()")
    return Script(
        prelude=prelude,
        init=tuple(init),
        forward=tuple(maker.forward),
        takes=tuple(takes),
        result=result,
        setup=tuple(setup),
        optimizer=(f"optimizer = {chance.choice(OPTIMIZERS)}",),
        batch=tuple(lines),
        inputs=tuple(takes),
        targets=tuple(targets),
        loss=expression,
        events=EVENTS,
        limit=(chance.choice(LIMITS),),
    )


def _batch(chance: random.Random, dtype: str) -> tuple[list[str], list[str], list[str]]:
    """Statements that make a batch, its inputs and its targets."""
    rows = chance.choice((6, 16, 32))
    typed = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    kind = chance.choice(("rows", "rows", "rows", "words", "words", "pictures", "tokens", "complex"))
    lines = {
        "rows": [f"x0 = torch.randn({rows}, {chance.choice((4, 6, 8))}{typed})"],
        "words": [f"x0 = torch.randn({rows // 2}, {chance.choice((3, 5))}, {chance.choice((4, 8))}{typed})"],
        "pictures": [f"x0 = torch.randn({rows // 4 + 1}, {chance.choice((2, 3))}, 8, 8{typed})"],
        "tokens": [f"x0 = torch.randint(0, 12, ({rows}, 4))"],
        "complex": [f"x0 = torch.randn({rows}, 4, dtype=torch.complex64)"],
    }[kind]
    lines = list(lines)
    takes = ["x0"]
    if kind in ("tokens", "complex"):
        lines.append(f"x1 = torch.randn({rows}, 4{typed})")
        takes.append("x1")
    elif chance.random() < 0.15:
        lines[0] += chance.choice((".transpose(0, 1).contiguous().transpose(0, 1)", "[1:]", "[::2]", "[..., ::2]"))
    if chance.random() < 0.25:
        name = f"x{len(takes)}"
        lines.append(f"{name} = {chance.choice(ALIASES)}")
        takes.append(name)
    targets = []
    if chance.random() < 0.5:
        lines.append(f"t0 = torch.randint(0, 4, ({rows},))")
        targets.append("t0")
    return lines, takes, targets


def _loss(chance: random.Random, maker: Maker, rows: int) -> tuple[str, str] | None:
    """What the module returns, and the loss of that."""
    graded = maker.tensors(lambda t: t.requires_grad)
    if not graded:
        return None
    result = graded[-1]
    if chance.random() < 0.25 and len(graded) > 1:
        others = chance.sample(graded, min(len(graded), chance.randint(2, 3)))
        return f"({', '.join(others)})", "sum((o.abs() ** 2).mean().float() for o in out)"
    value = maker.value(result)
    if value.is_complex():
        return result, chance.choice(OF_COMPLEX)
    labelled = value.dim() > 1 and value.shape[1] >= 4 and value.shape[0] == rows
    return result, chance.choice([form for form in LOSSES if "t0" not in form or labelled])


def _extras(chance: random.Random, maker: Maker) -> list[str]:
    """Names for parameters that there are already, and parameters without use."""
    found = []
    weights = [name for name, _, kind in maker.weights if not kind.startswith(("buffer", "layer"))]
    if weights and chance.random() < 0.08:
        found.append(f"self.again = {chance.choice(weights)}")
    if chance.random() < 0.08:
        found.append("self.unused = nn.Parameter(torch.randn(3))")
    return found
