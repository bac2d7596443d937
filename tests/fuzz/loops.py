"""Random training loops: a small net, an optimizer with options of its own, and what a loop does between steps."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from torch import nn

from tests.fuzz.classes import CLASSES
from tests.fuzz.events import BEFORE, EVENTS, LATER
from tests.fuzz.judge import Seen, trains
from tests.fuzz.programs import LIMITS
from tests.fuzz.script import Script, namespace

__all__ = ["drawn_loop"]

ACTIVATIONS = ("nn.Tanh()", "nn.GELU()", "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.SiLU()", "nn.ELU()", "nn.PReLU()")


def drawn_loop(seed: int) -> tuple[Script, list[Seen]]:
    """The loop of a seed, and what eager mode makes of it. Draws again until there is one that trains."""
    for attempt in range(200):
        script = _script(random.Random(7919 * seed + attempt))
        seen = None if script is None else trains(script)
        if script is not None and seen is not None:
            return script, seen
    raise RuntimeError(f"no loop for seed {seed}")


def _script(chance: random.Random) -> Script | None:
    """A loop at random."""
    kind = chance.choice(("rows", "rows", "rows", "pictures", "words", "tokens"))
    width = chance.choice((4, 8, 12))
    layers = _layers(chance, kind, width)
    setup = [f"model = nn.Sequential(\n    {f',{chr(10)}    '.join(layers)},\n)"]
    if chance.random() < 0.1:
        setup.append(f"model[{chance.randrange(len(layers))}].requires_grad_(False)")
    if chance.random() < 0.06:
        setup.append("model.eval()")
    batch, loss = _data(chance, kind, width)
    updates = chance.random() < 0.2  # by itself: gradients are clipped, summed up, ...
    rate = chance.choice(("0.05", "0.01"))
    made = _optimizer(chance, rate, len(layers))
    optimizer = ["optimizer = None", f"updater = {made}"] if updates else [f"optimizer = {made}", "updater = optimizer"]
    script = Script(
        setup=tuple(setup),
        optimizer=tuple(optimizer),
        batch=tuple(batch),
        loss=loss,
        how='rows=16, how=""',
        autocast="bfloat16" if chance.random() < 0.05 else "",
        limit=(chance.choice(LIMITS),),
    )
    script = _with_prelude(script)
    try:
        model = namespace(script)["model"]
    except Exception:  # noqa: BLE001 (of any kind: another one is drawn)
        return None
    return _with_prelude(replace(script, events=_events(chance, model, alone=updates)))


def _with_prelude(script: Script) -> Script:
    text = "\n".join((*script.setup, *script.optimizer, script.loss, *script.events))
    return replace(script, prelude=tuple(body for name, body in CLASSES.items() if re.search(rf"\b{name}\b", text)))


def _layers(chance: random.Random, kind: str, width: int) -> list[str]:
    p = chance.choice((0.1, 0.5))
    if kind == "pictures":
        first = [f"nn.Conv2d(2, {width}, 3, padding=1)"]
        parts = [
            f"nn.Conv2d({width}, {width}, 3, padding=1)", f"nn.Conv2d({width}, {width}, 1, bias=False)",
            f"nn.BatchNorm2d({width})", f"nn.GroupNorm(2, {width})", f"nn.Dropout({p})", f"nn.Dropout2d({p})",
            "nn.MaxPool2d(3, 1, 1)", "nn.AvgPool2d(3, 1, 1)", "Counted()",
        ]  # fmt: skip
        last = ["nn.AdaptiveAvgPool2d(2)", "nn.Flatten()", f"nn.Linear({4 * width}, 4)"]
    else:
        first = {"rows": [f"nn.Linear(8, {width})"], "words": [f"nn.Linear(8, {width})"],
                 "tokens": [f"nn.Embedding(12, {width})"]}[kind]  # fmt: skip
        parts = [
            f"nn.Linear({width}, {width})", f"nn.Linear({width}, {width})", f"nn.Linear({width}, {width}, bias=False)",
            f"nn.LayerNorm({width})", f"nn.RMSNorm({width})", f"nn.Dropout({p})", f"Block({width}, {p})",
            f"Smoothed({width})", "Counted()", f"Twice({width})", f"Checkpointed({width}, {p})",
            f"nn.utils.parametrizations.weight_norm(nn.Linear({width}, {width}))",
            f"nn.utils.parametrizations.spectral_norm(nn.Linear({width}, {width}))",
        ]  # fmt: skip
        if kind == "rows":
            parts += [f"nn.BatchNorm1d({width})", f"nn.BatchNorm1d({width}, momentum=None)"]
        else:
            parts += [f"Attention({width}, {p})", f"Attention({width}, 0.0)"]
            parts += [f"nn.TransformerEncoderLayer({width}, 2, {width}, {p}, batch_first=True)"]
        last = [f"nn.Linear({width}, {8 if kind != 'tokens' else 4})"]
    common = [layer for layer in parts if layer != "Counted()" or chance.random() < 0.3]
    body = []
    for _ in range(chance.randint(2, 5)):
        body.append(chance.choice(common))
        if chance.random() < 0.7:
            body.append(chance.choice(ACTIVATIONS))
    return [*first, *body, *last]


def _data(chance: random.Random, kind: str, width: int) -> tuple[list[str], str]:
    """Statements of `batch`, and the loss."""
    scaled = ' * SETTINGS["scale"]' if chance.random() < 0.05 else chance.choice(("", "", "", " / 2", " * 0.5"))
    if kind in ("rows", "words"):
        length = "" if kind == "rows" else " 3,"
        lines = [
            f"x0 = torch.randn(rows,{length} 8)",
            'if how == "strided":\n    x0 = x0.transpose(0, -1).contiguous().transpose(0, -1)',
            'if how == "sliced":\n    x0 = x0.repeat_interleave(2, -1)[..., ::2]',
            'if how == "expanded":\n    x0 = x0[:1].expand_as(x0)',
            'if how == "double":\n    x0 = x0.double()',
            "t0 = torch.randn_like(x0)",
            'if how == "same":\n    t0 = x0',
            'if how == "overlapping":\n    t0 = x0.flatten().unfold(0, 8, 1)[: x0[..., 0].numel()].view(x0.shape)',
        ]
        loss = chance.choice(("F.mse_loss(out, t0)", "F.l1_loss(out, t0)", "F.smooth_l1_loss(out, t0)",
                              "nn.functional.huber_loss(out, t0)", "(out - t0).square().sum()"))  # fmt: skip
        return lines, loss + scaled
    first = "x0 = torch.randn(rows // 4, 2, 6, 6)" if kind == "pictures" else "x0 = torch.randint(0, 12, (rows, 4))"
    layout = 'if how in ("strided", "sliced"):\n    x0 = x0.contiguous(memory_format=torch.channels_last)'
    if kind == "tokens":
        layout = 'if how in ("strided", "sliced"):\n    x0 = x0.t().contiguous().t()'
    lines = [
        first,
        layout,
        'if how == "expanded":\n    x0 = x0[:1].expand_as(x0)',
        f"t0 = torch.randint(0, 4, {'(rows // 4,)' if kind == 'pictures' else '(rows * 4,)'})",
    ]
    smooth = chance.choice(("", ", label_smoothing=0.1", ", reduction='sum'", ", weight=torch.ones(4)"))
    return lines, f"F.cross_entropy(out.reshape(-1, 4), t0{smooth}){scaled}"


def _optimizer(chance: random.Random, rate: str, layers: int) -> str:
    """One of torch's, with options."""
    name, options = chance.choice(OPTIMIZERS)
    given = [text for text in options if chance.random() < 0.35]
    if name == "torch.optim.SGD" and "nesterov=True" in given:
        given = [*(text for text in given if "dampening" not in text and "momentum" not in text), "momentum=0.9"]
    params = "model.parameters()"
    drawn = chance.random()
    middle = chance.randrange(1, layers)
    if drawn < 0.12:
        params = (
            f'[{{"params": model[:{middle}].parameters()}}, {{"params": model[{middle}:].parameters(), "lr": 0.002}}]'
        )
    elif drawn < 0.2:
        params = f"model[{middle}:].parameters()"
    if name == "torch.optim.Muon":
        params = "[p for p in model.parameters() if p.dim() == 2]"
    step = f"torch.tensor({rate})" if chance.random() < 0.04 and "optim.Adam" in name else rate
    return f"{name}({params}, lr={step}{''.join(f', {text}' for text in given)})"


COMMON = ("weight_decay=0.1", "maximize=True")
OPTIMIZERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *(("torch.optim.SGD", ("momentum=0.9", "dampening=0.1", "nesterov=True", *COMMON)),) * 4,
    *(("torch.optim.Adam", ("amsgrad=True", "betas=(0.8, 0.95)", "eps=1e-6", *COMMON)),) * 3,
    *(("torch.optim.AdamW", ("amsgrad=True", "betas=(0.8, 0.95)", "eps=1e-6", *COMMON)),) * 5,
    ("torch.optim.SGD", ("momentum=0.9", "foreach=True")),
    ("torch.optim.AdamW", ("foreach=True", "fused=True")),
    ("torch.optim.NAdam", ("momentum_decay=0.01", "decoupled_weight_decay=True", *COMMON)),
    ("torch.optim.RAdam", ("decoupled_weight_decay=True", *COMMON)),
    ("torch.optim.Adamax", COMMON),
    ("torch.optim.Adadelta", COMMON),
    ("torch.optim.Adagrad", ("lr_decay=0.1", "initial_accumulator_value=0.1", *COMMON)),
    ("torch.optim.RMSprop", ("momentum=0.9", "centered=True", *COMMON)),
    ("torch.optim.Rprop", ("maximize=True",)),
    ("torch.optim.ASGD", COMMON),
    ("torch.optim.Adafactor", ("weight_decay=0.1",)),
    ("torch.optim.Muon", ("weight_decay=0.2", "nesterov=False")),
    ("Signed", ()),
)


# --- events -----------------------------------------------------------------------------------------------------------


def _events(chance: random.Random, model: nn.Module, *, alone: bool) -> tuple[str, ...]:
    """Steps, and what happens between them."""
    places = _places(model)
    later: list[str] = []
    found: list[str] = []
    if chance.random() < 0.25:
        first = chance.choice(BEFORE)
        found.append(first[0])
        later += first[1:]
    changes = chance.randint(1, 3)
    steps = chance.randint(3, 6)
    at = sorted(chance.choices(range(1, steps), k=changes))
    for number in range(steps):
        for _ in range(at.count(number)):
            event = next(filter(None, (_filled(chance, _chosen(chance), places) for _ in range(100))))
            if event.startswith("step("):
                event = event.replace("N", str(10 + number))
            found.append(event)
            head = event.split(" = ")[0]
            if head in LATER:
                later.append(LATER[head])
        found.append(f"step({number})")
        if alone:
            found += _update(chance, number)
        if later and chance.random() < 0.6:
            found.append(chance.choice(later))
    return tuple(found)


def _chosen(chance: random.Random) -> str:
    kinds = list(EVENTS)
    (kind,) = chance.choices(kinds, [EVENTS[each][0] for each in kinds])
    return chance.choice(EVENTS[kind][1])


def _update(chance: random.Random, number: int) -> list[str]:
    """What a loop that updates by itself does with gradients."""
    if number % 2 == 0 and chance.random() < 0.5:
        return []  # accumulates
    clip = chance.choice(("", "", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
                          "torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)"))  # fmt: skip
    zero = chance.choice(("updater.zero_grad()", "updater.zero_grad(set_to_none=False)", "model.zero_grad()"))
    return [*([clip] if clip else []), "updater.step()", zero]


def _places(model: nn.Module) -> dict[str, list[str]]:
    """Where modules of a kind are, as expressions ("model[2].up")."""
    found: dict[str, list[str]] = {"linear": [], "dropout": [], "norm": [], "any": [], "leaf": [], "scaled": []}
    kinds: dict[str, Any] = {
        "linear": nn.Linear, "dropout": nn.Dropout, "norm": (nn.BatchNorm1d, nn.BatchNorm2d),
    }  # fmt: skip
    for path, module in model.named_modules():
        if not path or "parametrizations" in path:
            continue
        place = "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
        found["any"].append(place)
        if not list(module.children()):
            found["leaf"].append(place)
        if type(module).__name__ == "Block":
            found["scaled"].append(place)
        for kind, what in kinds.items():
            if isinstance(module, what):
                found[kind].append(place)
    return found


def _filled(chance: random.Random, template: str, places: dict[str, list[str]]) -> str:
    """A template of an event with modules of this net in it; empty where there is no such module."""
    for kind in set(re.findall(r"\{(\w+)\}", template)):
        if not places.get(kind):
            return ""
        template = template.replace(f"{{{kind}}}", chance.choice(places[kind]))
    return template
