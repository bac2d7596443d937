"""Facts about one ATen operator: the type of the rows in `magis.ops.operators`, and questions that they answer."""

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
    """Output and logsumexp of the forward among the backward's arguments, which begin with gradient, query, key,
    value."""
    lengths: tuple[int, ...] = ()
    """Lengths of the sequences of a packed batch."""
    queries: bool = False
    """True if no result of the kernel mixes its query rows."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One operator. Positions are those of arguments, from 0."""

    kind: str = "unknown"
    """Kind of work: selects the share of a device's peak that the operator reaches (`magis.cost.devices`)."""
    per_element: int = 0
    """Arithmetic per element, in floating-point operations, as a vector unit pays for it: a polynomial of `exp` takes
    about a dozen, `tanh` and `erf` about two dozen. Products count exactly (`magis.cost.flops`)."""
    split: str = ""
    """Rule that says along which dimensions it can be cut: module of `magis.ops.splits`, and function."""
    never_split: str = ""
    """Reason why it is never cut, in a few words."""
    elementwise: bool = False
    """True if every element of the result depends on the same element of the inputs alone."""

    # Memory.
    view: bool = False
    """True if it may return a view of its input. Capture finds out from the storages if a call did."""
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
    """True if the in-place form may overwrite the second argument instead (for add only without ``alpha``)."""
    overwrites: bool = False
    """True if the in-place form reads nothing of what it writes."""
    undeclared: tuple[int, ...] = ()
    """Positions of arguments that it writes in training although its schema does not say so."""
    training: int | None = None
    """Position of the flag for training."""
    scaled: int | None = None
    """Position of an argument that it writes, as its schema says, with a ``grad_scale`` only."""
    layout: str = ""
    """Layout of results where fake tensors get another one than the kernel's: "operands" (torch's rule for element-wise
    operators), "rows" (the first result contiguous, or channels last if it is), "all rows" (all contiguous), or
    "second" (the first result in the memory format of the second input)."""
    input_size: bool = False
    """True if it allocates its result as large as its input and then shrinks it: the memory stays (losses)."""
    one_more: int | None = None
    """Position of a result that is allocated with one more element than it has, unless it is empty."""
    any_layout: bool = False
    """True if it is known to compute the same on views; views and element-wise operators do so anyway."""
    scratch: str = ""
    """Cause of the size of its scratch memory for integers: "shapes" alone; or, for floats as well, "values"."""

    # Arguments and numbers.
    dim: int = 1
    """Position of the dimension that it works along."""
    combines: str = ""
    """Operation that combines the results of parts of a reduced dimension: "sum", "mean" (of equal parts), "max" ..."""
    reduction: int = -1
    """Position of a loss's reduction, an int: 0 none, 1 mean (the default), 2 sum."""
    product: tuple[str, ...] = ()
    """Labels of a matrix product's factors and of its result, as in an einsum."""
    adds: bool = False
    """True if the product is added to the first argument."""
    attention: AttentionKernel | None = None
    parameters: tuple[int, ...] = ()
    """Positions of a norm's weight, bias and running statistics, whose data type may be wider than its input's."""
    one_dtype: bool = False
    """True if kernels on every device refuse operands of different data types (the overload `dtype` takes them)."""
    free_draws: bool = False
    """True if the number of random draws does not depend on what arguments hold (where it `overwrites`: of its in-place
    form)."""

    def in_place_form(self, target: str) -> str | None:
        """Return the in-place form with the same arguments and numbers, on the first argument; None without one."""
        _, name, overload = target.split(".") if self.in_place and not self.view else ("", "", "")
        known = overload in self.in_place and not name.endswith("_")
        return f"aten.{name}_.{self.in_place[overload]}" if known else None

    def functional_form(self, target: str) -> str | None:
        """Return the operator that makes the same numbers as an in-place form in a fresh output; None without one.

        For one that changes a tensor's shape or strides but no data (`t_`): the view with the new shape and strides.
        """
        _, name, overload = target.split(".") if self.in_place else ("", "", "")
        plain = next((plain for plain, own in self.in_place.items() if own == overload), None)
        return f"aten.{name[:-1]}.{plain}" if plain and name.endswith("_") else None

    def out_form(self, target: str) -> tuple[str, str] | None:
        """Return the out variant that may write over any input, and its keyword; None without one."""
        known = self.out and target.endswith(".default")
        return (target.replace(".default", f".{self.out}"), self.out) if known else None

    def may_change_place(
        self, target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, dtype: str
    ) -> bool:
        """Return True if the functional, in-place and out forms compute the same bits in ``dtype``."""
        if not dtype.startswith("complex"):
            return True
        real = not target.startswith("aten.mul.") or isinstance(args[1], (int, float))
        return target.rpartition(".")[2] in self.exact_for_complex and real and not kwargs

    def least_bytes(self, position: int, made: Any, largest: int) -> int:
        """Return the bytes behind the fresh tensor `made` where that is more than its elements take, else 0.

        `largest`: bytes of the largest input.
        """
        if self.one_more == position and made.numel():
            return int(made.nbytes + made.element_size())
        return largest if self.input_size else 0

    def undeclared_writes(self, args: tuple[object, ...]) -> tuple[int, ...]:
        """Return positions of the arguments that this call writes although the schema does not say so."""
        given = self.training is not None and self.training < len(args)
        return self.undeclared if given and args[self.training or 0] is True else ()

    def without_statistics(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Return the arguments without running statistics, for the same outputs without a second update of these."""
        return tuple(None if index in self.undeclared else arg for index, arg in enumerate(args))

    def spared(self, kwargs: Mapping[str, object]) -> int | None:
        """Return the position of the argument that this call does not write although its schema says so."""
        return self.scaled if kwargs.get("grad_scale") is None else None
