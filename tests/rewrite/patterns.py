"""For every rule a program of the left side: made from the pattern itself, with tensors of drawn sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from magis.graph import Graph, Op, Ref, replace_refs
from magis.rewrite.functionalize import functionalize
from magis.rewrite.rules.language import CallPattern, Each, Pattern, Var, is_family
from magis.rewrite.rules.rule_table import Rule
from tests.nets import FORWARD, Block, Built
from tests.oracles import captured

SIZES = {
    "merge-mm": "x:mk *a:kN", "merge-mm-rows": "*a:Mk x:kn", "merge-addmm": "*c:N x:mk *a:kN",
    "merge-addmm-rows": "c:n *a:Mk x:kn", "merge-conv": "x:biyy *w:Oizz", "merge-conv-bias": "x:biyy *w:Oizz *c:O",
    "merge-conv-batch": "*x:Biyy w:oizz",
    "merge-unary": "x:lmn", "merge-binary": "x:lmn y:lmn", "merge-unary-cat": "*a:lm",
    "merge-binary-cat": "*a:lm *b:lm",
    "merge-sum": "a:mk b:kn c:mj d:jn", "merge-sum-back": "a:mk b:kn c:mj d:jn",
    "merge-sum-views": "a:mk b:kn c:mj d:jn", "merge-sum-views-back": "a:mk b:kn c:mj d:jn",
    "merge-sum-chain": "r:v a:mk b:kn c:mj d:jn", "merge-sum-chain-back": "r:v a:mk b:kn c:mj d:jn",
    "derematerialize": "a:mn",
    "split-mm": "x:mk y:kn", "split-mm-rows": "y:mk x:kn", "split-addmm": "c:n x:mk y:kn",
    "split-addmm-rows": "c:n y:mk x:kn", "split-conv": "x:biyy y:oizz", "split-conv-bias": "x:biyy y:oizz c:o",
    "split-conv-batch": "x:biyy y:oizz", "unary-to-pieces": "x:lmn", "binary-to-pieces": "x:lmn y:lmn",
    "unary-into-cat": "*a:lm", "binary-into-cat": "*a:lm *b:lm", "split-sum": "a:mk b:kn c:mj d:jn",
    "cat-of-split": "x:lmn", "split-of-cat": "*a:lm", "flatten-cat": "*l:lm *a:lm *r:lm",
    "nest-cat": "*l:lm *a:lm *r:lm",
    "mm-of-cat": "x:mk *a:kN", "cat-of-mm": "x:mk *a:kN", "mm-of-cat-rows": "*a:Mk x:kn",
    "cat-of-mm-rows": "*a:Mk x:kn",
    "add-right": "a:mn b:mn c:mn", "add-left": "a:mn b:mn c:mn", "add-swap": "a:mn b:mn",
    "mul-right": "a:mn b:mn c:mn", "mul-left": "a:mn b:mn c:mn", "mul-swap": "a:mn b:mn",
    "mm-right": "a:mk b:kj c:jn", "mm-left": "a:mk b:kj c:jn",
    "mul-over-add": "a:mn b:mn c:mn", "add-of-mul": "a:mn b:mn c:mn",
    "mm-over-add": "a:mk b:mk c:kn", "add-of-mm": "a:mk b:mk c:kn",
    "mm-over-add-right": "a:kn b:kn c:mk", "add-of-mm-right": "a:kn b:kn c:mk",
    "t-of-t": "a:mn", "t-of-mm": "a:mk b:kn", "mm-of-t": "a:mk b:kn", "t-of-add": "a:mn b:mn", "add-of-t": "a:mn b:mn",
    "cat-of-t": "*a:Mk", "cat-of-t-rows": "*a:kM", "t-of-cat": "*a:Mk", "t-of-cat-rows": "*a:kM",
    "scale-of-mm": "a:mk b:kn", "mm-of-scale": "a:mk b:kn", "scale-of-mm-right": "a:mk b:kn",
    "mm-of-scale-right": "a:mk b:kn", "scale-of-add": "a:mn b:mn", "add-of-scale": "a:mn b:mn",
    "scale-of-t": "a:mn", "t-of-scale": "a:mn", "add-of-view": "a:mn b:mn", "view-of-add": "a:mn b:mn",
}  # fmt: skip
"""Shapes of each rule's tensors: one letter per dimension, equal letters equal sizes, capitals another size for every
member of a list; ``v`` is the size of what the pattern views."""

BATCHED = {
    name
    for name, text in SIZES.items()
    if "conv" not in name and "addmm" not in name and "cat" not in name and name != "t-of-t"
}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "neg": torch.neg, "sqrt": torch.sqrt}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mul": torch.mul, "maximum": torch.maximum, "sub": torch.sub}


@dataclass
class Program:
    """The left side of a rule on real tensors."""

    pattern: Pattern
    tensors: dict[str, Any]
    dim: int
    unary: str = "relu"
    binary: str = "mul"
    factor: float = 0.375

    def __call__(self, _: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        names = {
            name: [next(rest) for _ in item] if isinstance(item, list) else next(rest)
            for name, item in self.tensors.items()
        }
        found = self.value(self.pattern, names)
        # What the caller gets stays as it is, layout included; what lies between may change.
        return tuple(own(torch.abs(each)) for each in (found if isinstance(found, list | tuple) else [found]))

    def value(self, pattern: Pattern, names: dict[str, Any]) -> Any:
        match pattern:
            case Var(name=name):
                return names[name]
            case Each(of=inner):
                return self.value(inner, names)
            case CallPattern(form="cat" | "split" as form, args=args, dim=dim):
                found = [self.value(arg, names) for arg in args]
                dim = self.dim if isinstance(dim, str) else dim
                if form == "split":
                    (whole, *like) = found
                    sizes = [each.shape[dim] for each in like[0]] if like else halves(whole.shape[dim])
                    return list(torch.split(whole, sizes, dim % whole.dim()))
                flat = [t for each in found for t in (each if isinstance(each, list) else [each])]
                return torch.cat(flat, dim % flat[0].dim())
            case CallPattern(form=form, args=args):
                found = [self.value(arg, names) for arg in args]
                if not is_family(pattern):
                    return self.call(form, found)
                count = next(len(each) for each in found if isinstance(each, list))
                return [
                    self.call(form, [each[at] if isinstance(each, list) else each for each in found])
                    for at in range(count)
                ]

    def call(self, form: str, args: Sequence[Tensor]) -> Tensor:
        match form:
            case "mm":
                return torch.bmm(*args) if args[0].dim() == 3 else torch.mm(*args)
            case "addmm":
                return torch.addmm(*args)
            case "conv" | "convb":
                return F.conv2d(*args, padding=1)
            case "add" | "mul" | "sub":
                result: Tensor = getattr(torch, form)(*args)
                return result
            case "scale":
                return args[0] * self.factor
            case "unary":
                return UNARY[self.unary](args[0])
            case "binary":
                return BINARY[self.binary](*args)
            case "t":
                return args[0].t() if args[0].dim() == 2 else args[0].transpose(args[0].dim() - 2, args[0].dim() - 1)
            case "view":
                return args[0].reshape(-1)
        raise KeyError(form)


def program(rule: Rule, seed: int, *, dtype: torch.dtype = torch.float64) -> Built:
    """The left side of a rule with sizes, literals, lists and tensors drawn from the seed; seed 0: small ones."""
    drawn = random.Random(seed)
    batch = drawn.choice([(), (2,), (3,)]) if seed and rule.name in BATCHED else ()
    count = drawn.choice([2, 2, 3]) if seed else 2
    least, most = (1, 5) if seed else (2, 4)
    sizes: dict[Any, int] = {"z": 3}

    def size(letter: str, member: int) -> int:
        key = (letter, member) if letter.isupper() else letter
        low = max(2, least) if letter in "xlmno" else least
        return sizes.setdefault(key, drawn.randint(low, most))

    tensors: dict[str, Any] = {}
    for word in SIZES[rule.name].split():
        name, _, letters = word.partition(":")
        shapes = [
            (*batch, *(size(letter, member) for letter in letters)) if letters != "v" else None
            for member in range(count if name.startswith("*") else 1)
        ]
        made = [torch.empty(0) if shape is None else _tensor(drawn, shape, dtype) for shape in shapes]
        tensors[name.removeprefix("*")] = made if name.startswith("*") else made[0]
    if "r" in tensors and not isinstance(tensors["r"], list):
        tensors["r"] = _tensor(drawn, (size("m", 0) * size("n", 0) * (batch[0] if batch else 1),), dtype)
    if rule.name == "split-conv-batch":
        tensors["x"] = torch.cat([tensors["x"]] * 2)
    rank = max((t.dim() for item in tensors.values() for t in (item if isinstance(item, list) else [item])), default=1)
    made_of = Program(
        rule.before if rule.find is None else CallPattern("twice", ()), tensors, -drawn.randint(1, rank),
        drawn.choice(sorted(UNARY)), drawn.choice(sorted(BINARY)), drawn.choice([0.375, 2.0, -1.5]),
    )  # fmt: skip
    run: Any = made_of if rule.find is None else _twice
    inputs = tuple(t for item in tensors.values() for t in (item if isinstance(item, list) else [item]))
    return Built(Block(run), inputs, (), None, FORWARD)


def own(x: Tensor) -> Tensor:
    """A dense copy."""
    return x.clone(memory_format=torch.contiguous_format)


def halves(size: int) -> list[int]:
    """Two pieces, as equal as they can be."""
    return [size // 2, size - size // 2]


def _twice(_: Block, a: Tensor) -> tuple[Tensor, ...]:
    """Something to recompute, and its recomputation."""
    return torch.abs(torch.tanh(a)), torch.neg(torch.tanh(a))


def _tensor(drawn: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(drawn.randrange(2**31))
    return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype) + 0.1


def graph_of(built: Built) -> Graph:
    """The program as a graph. Capture sees that a tensor transposed twice is itself; here it is not told."""
    graph = functionalize(captured(built).graph)
    op = graph.ops[0]
    if op.target == "aten.t.default" and not any(op.made()[0] in other.inputs() for other in graph.ops):
        (value,) = op.inputs()
        again = replace(graph.values[value], id=max(graph.values) + 1, name="")
        back = Op(max(o.id for o in graph.ops) + 1, "aten.t.default", (Ref(op.made()[0]),), (), (again.id,))
        rest = tuple(
            replace(o, args=tuple(replace_refs(arg, {value: again.id}) for arg in o.args)) for o in graph.ops[1:]
        )
        return replace(graph, values={**graph.values, again.id: again}, ops=(op, back, *rest))
    return graph
