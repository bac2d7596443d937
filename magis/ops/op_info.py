"""What is known of an ATen operator: the type of the rows in `magis.ops.operators`, and what calls do by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from magis.graph.nodes import Arg


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Positions of an attention kernel's arguments; -1 where it has none. The mask may be a keyword."""

    dropout: int
    causal: int
    mask: int = -1
    saved: tuple[int, int] = (-1, -1)
    """Of the backward: the forward's output and logsumexp. The gradient comes first, then query, key, value."""
    lengths: tuple[int, ...] = ()
    """Lengths of the sequences of a packed batch."""
    queries: bool = False
    """Whether the kernel keeps its rows apart in all of its results."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One operator. Positions are those of arguments, from 0."""

    kind: str = "unknown"
    """What its time is made of: selects the share of a device that it reaches (`magis.cost.devices`)."""
    per_element: int = 0
    """Arithmetic per element, in floating-point operations, as a vector unit pays for it: a polynomial of `exp` takes
    about a dozen, `tanh` and `erf` about two dozen. Products count exactly (`magis.cost.flops`)."""
    split: str = ""
    """The rule that says along which dimensions it can be cut: module of `magis.ops.splits`, and function."""
    never_split: str = ""
    """Why it is never cut, in a few words."""
    elementwise: bool = False
    """Every element of the result depends on the same element of the tensors alone."""

    # Memory.
    view: bool = False
    """May return a window on its input. Whether a call did is read off the storages at capture."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Overload -> overload of the in-place form with the same arguments and numbers, on its first argument."""
    out: str = ""
    """Overload, and keyword, of the out variant that may write over any input: of point-wise operators without in-place
    form. They are built on TensorIterator, which allows an output that is exactly one of the inputs."""
    exact_for_complex: tuple[str, ...] = ()
    """Overloads whose in-place form computes the same bits of complex numbers, for add and sub without ``alpha``, for
    mul by a real number. The others multiply complex numbers: whether the compiled loop fuses a product and a sum (and
    so rounds once) depends on whether result and input share memory, and on which factor is the first."""
    commutative: bool = False
    """The in-place form may as well take over the second argument (for add only without ``alpha``)."""
    overwrites: bool = False
    """The in-place form reads nothing of what it writes."""
    undeclared: tuple[int, ...] = ()
    """Arguments that it writes in training although its schema does not say so."""
    training: int | None = None
    """Position of the flag that says whether it trains."""
    scaled: int | None = None
    """An argument that it writes, as its schema says, with a ``grad_scale`` only."""
    layout: str = ""
    """How results lie where torch's functions for fake tensors follow one input: by all "operands"; the first row by
    row (or channels last), "rows"; "all rows"; the first row by row, or channels last where the second input does,
    "second"."""
    input_size: bool = False
    """Allocates its result as large as its input and then shrinks it (to the mean, say): the memory stays."""
    one_more: int | None = None
    """Position of the result that, where it has elements, was made with one more."""
    any_layout: bool = False
    """Known to compute the same on windows; views and element-wise operators are, too."""
    scratch: str = ""
    """What its scratch hangs on where it takes whole numbers: "shapes" alone; or, of floats as well, "values"."""

    # Arguments and numbers.
    dim: int = 1
    """Position of the dimension that it works along."""
    combines: str = ""
    """How the results for parts of a reduced dimension become the whole's; the mean of equal parts' means is one."""
    reduction: int = -1
    """Of a loss: position of the reduction, an int: 0 none, 1 mean (the default), 2 sum."""
    product: tuple[str, ...] = ()
    """Of a matrix product: labels of both factors and of the result, as in an einsum."""
    adds: bool = False
    """The product is added to the first argument."""
    attention: AttentionKernel | None = None
    parameters: tuple[int, ...] = ()
    """Weight, bias and running statistics of a norm, which may be wider than its input."""
    one_dtype: bool = False
    """Kernels refuse operands of different data types, on every device; not those of the overload `dtype`."""
    free_draws: bool = False
    """Draws as many random numbers whatever its arguments hold: where it `overwrites`, the in-place form does."""

    def in_place_form(self, target: str) -> str | None:
        """The operator with the same arguments and numbers that writes over its first argument; None without one."""
        _, name, overload = target.split(".") if self.in_place and not self.view else ("", "", "")
        known = overload in self.in_place and not name.endswith("_")
        return f"aten.{name}_.{self.in_place[overload]}" if known else None

    def functional_form(self, target: str) -> str | None:
        """The operator that an in-place form is one of, with a fresh output, same arguments, same numbers.

        Of one that changes how a tensor looks at its memory but no data: in a graph, whose values never change, the
        view that has the new looks.
        """
        _, name, overload = target.split(".") if self.in_place else ("", "", "")
        plain = next((plain for plain, own in self.in_place.items() if own == overload), None)
        return f"aten.{name[:-1]}.{plain}" if plain and name.endswith("_") else None

    def out_form(self, target: str) -> tuple[str, str] | None:
        """The out variant that may write over any input, and its keyword."""
        known = self.out and target.endswith(".default")
        return (target.replace(".default", f".{self.out}"), self.out) if known else None

    def may_change_place(
        self, target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, dtype: str
    ) -> bool:
        """Whether the functional operator, its in-place form or out variant make the same bits of ``dtype``."""
        if not dtype.startswith("complex"):
            return True
        real = not target.startswith("aten.mul.") or isinstance(args[1], (int, float))
        return target.rpartition(".")[2] in self.exact_for_complex and real and not kwargs

    def least_bytes(self, position: int, made: Any, largest: int) -> int:
        """Bytes of the memory behind the fresh tensor `made`, if it is more than its elements take; `largest` is the
        size of the largest input."""
        if self.one_more == position and made.numel():
            return int(made.nbytes + made.element_size())
        return largest if self.input_size else 0

    def undeclared_writes(self, args: tuple[object, ...]) -> tuple[int, ...]:
        """Positions of the arguments that this call writes without saying so."""
        given = self.training is not None and self.training < len(args)
        return self.undeclared if given and args[self.training or 0] is True else ()

    def without_statistics(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Arguments of the call that computes the same outputs without updating running statistics a second time."""
        return tuple(None if index in self.undeclared else arg for index, arg in enumerate(args))

    def spared(self, kwargs: Mapping[str, object]) -> int | None:
        """Position of the argument that this call leaves as it is although its schema says otherwise."""
        return self.scaled if kwargs.get("grad_scale") is None else None
