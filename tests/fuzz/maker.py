"""Writes the forward of a random module, running every statement as it is drawn, so that all shapes and types fit."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tests.fuzz.functions import PRELUDE
from tests.fuzz.operators import TEMPLATES

__all__ = ["DTYPES", "Maker"]

DTYPES = ("float32", "float32", "float32", "float32", "float32", "float64", "bfloat16")
MOST = 6000
"""Numbers in a tensor."""
LARGEST = 1e3
FIELD = re.compile(r"\{(layer:(?:[^{}]|\{[a-z]+\})*|[a-z]+)\}")
CHOICES = {
    "s": ("0.5", "2.0", "-1.5", "3", "0.125", "1e-3"),
    "p": ("0.1", "0.5", "0.3"),
    "width": ("4", "6", "8"),
}
CUTS = (":1", "1:", "::2", "0", "-1", "...", ":, 0", ":, ::2", ":, 1:", "..., 0", "..., ::2", "..., :2", "None")


class Maker:
    """A forward in the making: its statements, the module that they run on, and the tensors that they know."""

    def __init__(self, chance: random.Random, dtype: str, takes: dict[str, Tensor], *, mixed: bool) -> None:
        self.chance = chance
        self.dtype = dtype
        self.mixed = mixed
        self.init: list[str] = []
        self.forward: list[str] = []
        self.takes = tuple(takes)
        self.names: list[str] = list(takes)
        """Of tensors that statements can use, the latest last."""
        self.weights: list[tuple[str, tuple[int, ...], str]] = []
        self.module = nn.Module()
        self.space: dict[str, Any] = {
            "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "self": self.module, **takes,
        }  # fmt: skip
        for text in PRELUDE.values():
            exec(text, self.space)
        self._made = 0
        self._pending: list[str] = []

    def extend(self, statements: int) -> None:
        """Add so many statements (those that eager mode refuses do not count)."""
        kinds, weights = list(TEMPLATES), [weight for weight, _ in TEMPLATES.values()]
        tries = 0
        while len(self.forward) < statements and tries < 12 * statements:
            tries += 1
            (kind,) = self.chance.choices(kinds, weights)
            self.add(self.chance.choice(TEMPLATES[kind][1]), kind)

    def add(self, template: str, kind: str) -> bool:
        """Fill in a template and run it; False (and nothing is changed) where that cannot be."""
        self._pending = []
        try:
            text = self._filled(template)
        except Exception:  # noqa: BLE001 (of any kind: another statement is drawn)
            return False
        if kind == "in place" and self._x in self.takes and self.chance.random() < 0.9:
            return False  # few forwards write into their batch
        is_statement = kind in ("in place", "state") or re.search(r"^\S+_\(.*\)$", template) is not None
        if not is_statement:
            text = f"{self._target(template, text)} = {text}"
        if not self._runs(text):
            return False
        self.init += self._pending
        self.forward.append(text)
        return True

    # -- operands -----------------------------------------------------------------------------------------------

    def value(self, name: str) -> Tensor:
        found: Tensor = eval(name, self.space)
        return found

    def tensors(self, fits: Any) -> list[str]:
        return [name for name in self.names if fits(self.value(name))]

    def _recent(self, names: list[str]) -> str:
        """One of the names, the latest more likely."""
        back = min(int(self.chance.expovariate(0.8)), len(names) - 1)
        return names[len(names) - 1 - back]

    def _target(self, template: str, text: str) -> str:
        """A new name or, at times, that of the main operand, which is then gone."""
        used = re.match(r"[^v]*\b(v\d+)\b", text)
        if used and "{x}" in template and used[1] in self.names and self.chance.random() < 0.4:
            return used[1]
        self._made += 1
        return f"v{self._made}"

    def _filled(self, template: str) -> str:
        floats = self.tensors(lambda t: t.is_floating_point())
        self._x = self._recent(floats) if floats else ""
        if not floats and "{x}" in template:
            raise LookupError(template)
        return FIELD.sub(lambda match: self._field(match[1]), template)

    def _field(self, field: str) -> str:
        """What stands for a field of a template."""
        if field.startswith("layer:"):
            return self._layer(FIELD.sub(lambda match: self._field(match[1]), field.removeprefix("layer:")))
        if field in CHOICES:
            return self.chance.choice(CHOICES[field])
        found: Callable[[], str] = getattr(self, f"_field_{field}")
        return found()

    def _field_h(self) -> str:
        self._made += 1
        return f"v{self._made}"

    def _field_x(self) -> str:
        return self._x

    def _field_y(self) -> str:
        x = self.value(self._x)
        alike = self._some(lambda t: t.shape == x.shape and t.is_floating_point())
        return self._recent([name for name in alike if self.mixed or self.value(name).dtype == x.dtype])

    def _field_c(self) -> str:
        return self._recent(self._some(lambda t: t.is_complex()))

    def _field_i(self) -> str:
        return self._recent(self._some(lambda t: t.dtype in (torch.int64, torch.int32)))

    def _field_d(self) -> str:
        dims = self.value(self._x).dim()
        return str(self.chance.randrange(-dims, dims))

    _field_e = _field_d

    def _field_last(self) -> str:
        return str(self.value(self._x).shape[-1])

    def _field_second(self) -> str:
        return str(self.value(self._x).shape[1])

    def _field_cut(self) -> str:
        return self.chance.choice(CUTS if self.value(self._x).dim() > 1 else CUTS[:6])

    def _field_table(self) -> str:
        return self._weight((6, self.chance.choice((4, 8))))

    def _field_count(self) -> str:
        return self._buffer((), "torch.zeros(())")

    def _field_w(self) -> str:
        x = self.value(self._x)
        return self._weight((x.shape[-1],), x.dtype)

    _field_bias = _field_w

    def _field_m(self) -> str:
        x = self.value(self._x)
        return self._weight((x.shape[-1], self.chance.choice((4, 6, 8))), x.dtype)

    def _field_square(self) -> str:
        x = self.value(self._x)
        return self._weight((x.shape[-1], x.shape[-1]), x.dtype)

    def _field_three(self) -> str:
        x = self.value(self._x)
        return self._weight((4, x.shape[-1], x.shape[-1]), x.dtype)

    def _field_same(self) -> str:
        x = self.value(self._x)
        return self._weight(tuple(x.shape), x.dtype)

    def _field_mixed(self) -> str:
        x = self.value(self._x)
        return self._weight((x.shape[-1],), self.chance.choice((torch.float32, torch.float64, torch.bfloat16)))

    def _field_cw(self) -> str:
        return self._weight((self._of_c(),), torch.complex64)

    def _field_cm(self) -> str:
        return self._weight((self._of_c(), 4), torch.complex64)

    def _field_b(self) -> str:
        x = self.value(self._x)
        return self._buffer((x.shape[-1],), f"torch.randn({x.shape[-1]})", x.dtype)

    def _field_full(self) -> str:
        x = self.value(self._x)
        return self._buffer(tuple(x.shape), f"torch.zeros({tuple(x.shape)})", x.dtype)

    def _of_c(self) -> int:
        return self.value(self._some(lambda t: t.is_complex())[-1]).shape[-1]

    def _some(self, fits: Any) -> list[str]:
        found = self.tensors(fits)
        if not found:
            raise LookupError("no such tensor")
        return found

    def _weight(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> str:
        """A parameter: one that there is, or a new one."""
        kind = str(dtype or self.dtype).removeprefix("torch.")
        known = [name for name, size, what in self.weights if size == shape and what == kind]
        if known and self.chance.random() < 0.5:
            return self.chance.choice(known)
        name = f"w{len(self.weights)}"
        typed = "" if kind == "float32" else f", dtype=torch.{kind}"
        if len(shape) == 2 and self.chance.random() < 0.1:  # a view of a larger storage, or laid out otherwise
            forms = (f"{shape[1]}, {shape[0]}{typed}).t()", f"{shape[0]}, {2 * shape[1]}{typed})[:, ::2]")
            made = f"torch.randn({self.chance.choice(forms)}"
        else:
            made = f"torch.randn({', '.join(map(str, shape))}{typed})"
        frozen = ", requires_grad=False" if self.chance.random() < 0.07 and kind != "complex64" else ""
        self._declare(f"self.{name} = nn.Parameter({made}{frozen})")
        self.weights.append((f"self.{name}", shape, kind))
        return f"self.{name}"

    def _buffer(self, shape: tuple[int, ...], made: str, dtype: torch.dtype = torch.float32) -> str:
        known = [name for name, size, what in self.weights if size == shape and what == f"buffer {dtype}"]
        if known and self.chance.random() < 0.6:
            return self.chance.choice(known)
        name = f"b{len(self.weights)}"
        if known and self.chance.random() < 0.3:
            made = self.chance.choice((f"{known[0]}", f"{known[0]}.view(-1).view_as({known[0]})"))
        elif dtype != torch.float32:
            made = f"{made}.to({dtype})"
        kept = ", persistent=False" if self.chance.random() < 0.2 else ""
        self._declare(f'self.register_buffer("{name}", {made}{kept})')
        self.weights.append((f"self.{name}", shape, f"buffer {dtype}"))
        return f"self.{name}"

    def _layer(self, made: str) -> str:
        name = f"layer{len(self.weights)}"
        kind = self.value(self._x).dtype if "Embedding" not in made else torch.float32
        typed = "" if kind in (torch.float32, torch.int64) else f".to({kind})"
        self._declare(f"self.{name} = {made}{typed}")
        self.weights.append((f"self.{name}", (), "layer"))
        return f"self.{name}"

    def _declare(self, text: str) -> None:
        if not hasattr(self.module, "calls"):
            self.module.calls = 0  # type: ignore[assignment]
        exec(text, self.space)
        self._pending.append(text)

    # -- running ------------------------------------------------------------------------------------------------

    def _runs(self, text: str) -> bool:
        """Run a statement, and take up what it makes."""
        known = set(self.space)
        name = re.match(r"(?:.*:\n    )?(v\d+) = ", text)
        old = self.space.get(name[1]) if name else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(text, self.space)
                made = self._parts(name[1]) if name else []
                good = all(self._is_good(self.value(each)) for each in made) and all(
                    self._is_good(self.value(each)) for each in self.names[-6:]
                )
            except Exception:  # noqa: BLE001 (of any kind: another statement is drawn)
                good, made = False, []
        if name and not good:
            if old is None:
                self.space.pop(name[1], None)
            else:
                self.space[name[1]] = old
        if not good:
            for extra in set(self.space) - known - {"part"}:
                del self.space[extra]
            return False
        if name:
            self.names = [each for each in self.names if not re.match(rf"{name[1]}\b", each)] + made
        return True

    def _parts(self, name: str) -> list[str]:
        found = self.space[name]
        if isinstance(found, Tensor):
            return [name]
        if isinstance(found, (tuple, list)) and all(isinstance(part, Tensor) for part in found):
            return [f"{name}[{at}]" for at in range(len(found))][:3]
        raise TypeError(type(found))

    def _is_good(self, tensor: Tensor) -> bool:
        if not 0 < tensor.numel() <= MOST:
            return False
        if not tensor.is_floating_point() and not tensor.is_complex():
            return True
        plain = tensor.detach().abs()
        return bool(plain.isfinite().all()) and bool(plain.max() < LARGEST)
