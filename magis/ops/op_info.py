"""Facts about one ATen operator: the row type of `magis.ops.operators`, and queries on a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from magis.graph.nodes import Arg


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Argument positions of an attention kernel; -1 for arguments that it lacks. The mask may be a keyword."""

    dropout: int
    causal: int
    mask: int = -1
    saved: tuple[int, int] = (-1, -1)
    """Positions of the forward's output and logsumexp in the backward, whose first arguments are gradient, query, key
    and value."""
    lengths: tuple[int, ...] = ()
    """Positions of the sequence lengths of a packed batch."""
    queries: bool = False
    """True if each query row of the results depends on that query row alone."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Facts about one operator. Positions are those of arguments, from 0."""

    kind: str = "unknown"
    """Kind of work; selects the reachable fraction of a device's peak throughput (`magis.cost.devices`)."""
    per_element: int = 0
    """Floating-point operations per element on a vector unit: a polynomial of `exp` takes about a dozen, `tanh` and
    `erf` about two dozen. Products are counted exactly (`magis.cost.flops`)."""
    split: str = ""
    """Rule that labels the dimensions that can be split: module of `magis.ops.splits`, and function."""
    never_split: str = ""
    """Reason why the operator is never split, in a few words."""
    elementwise: bool = False
    """True if each element of the result depends only on the same element of the inputs."""

    # Memory.
    view: bool = False
    """True if the operator may return a view of its input; capture compares storages to know if a call did."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Overload -> overload of the in-place variant with the same arguments and results, on the first argument."""
    out: str = ""
    """Overload, and keyword, of the out variant whose output may be any input; only for operators without in-place
    variant: point-wise ones, built on TensorIterator, which allows an output that is exactly one of the inputs, and
    softmaxes along the last dimension, whose kernels read a row whole before they write it element by element."""
    keyword: str = ""
    """Keyword of the out variant, where it is not the overload."""
    exact_for_complex: tuple[str, ...] = ()
    """Overloads whose in-place variant is bitwise equal for complex dtypes: add and sub without ``alpha``, mul by a
    real number. Others multiply complex numbers: if the loop fuses a product and a sum (one rounding) depends on
    aliasing of result and input, and on the order of the factors."""
    commutative: bool = False
    """True if the in-place variant may overwrite the second argument instead (for add only without ``alpha``)."""
    overwrites: bool = False
    """True if the in-place variant overwrites its argument without reading it."""
    undeclared: tuple[int, ...] = ()
    """Positions of arguments that the operator writes in training mode although its schema does not say so."""
    training: int | None = None
    """Position of the `training` flag."""
    scaled: int | None = None
    """Position of an argument that the schema marks as written, but that is written only with a ``grad_scale``."""
    layout: str = ""
    """Layout of results: "operands" or "last operand first" (torch's rule for element-wise operators of several
    tensors, whose default the first is), "rows" (first result contiguous, or channels last if it is), "all rows" (all
    contiguous), "second" (first result in the memory format of the second input), or "fake" or "" (that of the fake
    kernel, which is right)."""
    input_size: bool = False
    """True if the result is allocated at the input's size and then resized: its storage keeps that size (losses)."""
    one_more: int | None = None
    """Position of a result whose storage has one more element than the result, unless it is empty."""
    any_layout: bool = False
    """True if the operator computes the same numbers on views; views and element-wise operators always do."""
    scratch: str = ""
    """Dependence of the workspace's bytes: "shapes" alone, for integer dtypes as well; "values": contents; "": by
    `kind`."""

    wide_sums: bool = False
    """True if gradients of half precision are summed in float32 and rounded once, and an `output_mask`, if any, is the
    last argument."""

    # Arguments and numbers.
    dim: int = 1
    """Position of the dimension argument."""
    combines: str = ""
    """Operation that merges results over parts of a reduced dimension: "sum", "mean" (of equal parts), "max" ..."""
    reduction: int = -1
    """Position of a loss's `reduction`, an int: 0 none, 1 mean (the default), 2 sum."""
    product: tuple[str, ...] = ()
    """Labels of a matrix product's factors and result, as in an einsum."""
    adds: bool = False
    """True if the matrix product is added to the first argument (`addmm`)."""
    attention: AttentionKernel | None = None
    parameters: tuple[int, ...] = ()
    """Positions of a norm's weight, bias and running statistics, whose dtype may be wider than the input's."""
    one_dtype: bool = False
    """True if kernels on every device reject operands of different dtypes (the overload `dtype` accepts them)."""
    free_draws: bool = False
    """True if the number of random draws does not depend on the contents of arguments (if `overwrites`: of the in-place
    variant's arguments)."""

    def in_place_form(self, target: str) -> str | None:
        """Return the in-place variant with the same arguments and results, on the first argument; None without one."""
        _, name, overload = target.split(".") if self.in_place and not self.view else ("", "", "")
        known = overload in self.in_place and not name.endswith("_")
        return f"aten.{name}_.{self.in_place[overload]}" if known else None

    def functional_form(self, target: str) -> str | None:
        """Return the out-of-place variant of an in-place operator; None without one.

        For in-place operators that change only shape or strides (`t_`), this is the view operator.
        """
        _, name, overload = target.split(".") if self.in_place else ("", "", "")
        plain = next((plain for plain, own in self.in_place.items() if own == overload), None)
        return f"aten.{name[:-1]}.{plain}" if plain and name.endswith("_") else None

    def out_form(self, target: str) -> tuple[str, str] | None:
        """Return the out variant whose output may be any input, and its keyword; None without one."""
        known = self.out and target.endswith(".default")
        return (target.replace(".default", f".{self.out}"), self.keyword or self.out) if known else None

    def may_change_place(
        self, target: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], *, dtype: str
    ) -> bool:
        """Return True if the functional, in-place and out variants are bitwise equal in ``dtype``."""
        if not dtype.startswith("complex"):
            return True
        real = not target.startswith("aten.mul.") or isinstance(args[1], (int, float))
        return target.rpartition(".")[2] in self.exact_for_complex and real and not kwargs

    def least_bytes(self, position: int, made: Any, largest: int) -> int:
        """Return the bytes of the storage of the new tensor `made` if larger than the tensor, else 0.

        `largest` is the bytes of the largest input.
        """
        if self.one_more == position and made.numel():
            return int(made.nbytes + made.element_size())
        return largest if self.input_size else 0

    def undeclared_writes(self, args: tuple[object, ...]) -> tuple[int, ...]:
        """Return the positions of arguments that this call writes although the schema does not say so."""
        given = self.training is not None and self.training < len(args)
        return self.undeclared if given and args[self.training or 0] is True else ()

    def without_statistics(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Return the arguments with None for running statistics: equal outputs, no second update of the statistics."""
        return tuple(None if index in self.undeclared else arg for index, arg in enumerate(args))

    def spared(self, kwargs: Mapping[str, object]) -> int | None:
        """Return the position of an argument that this call does not write although the schema says so; else None."""
        return self.scaled if kwargs.get("grad_scale") is None else None
