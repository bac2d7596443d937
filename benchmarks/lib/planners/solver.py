"""Linear and integer programs, solved by HiGHS through scipy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from magis.errors import MagisError

__all__ = ["Program"]

Floats = npt.NDArray[np.float64]

NODES = 20_000
"""Of branch and bound at most: a limit that is the same on every machine, where seconds are not."""


@dataclass
class Program:
    """Least cost of variables within bounds and rows: variables are numbered as they are added."""

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = np.inf, *, whole: bool = False) -> int:
        """The number of a new variable; ``whole``: it takes whole numbers only."""
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(
        self, terms: Mapping[int, float] | Sequence[tuple[int, float]], low: float = -np.inf, high: float = np.inf
    ) -> None:
        """low <= the sum of factor * variable <= high; factors of a variable named twice add up."""
        pairs = terms.items() if isinstance(terms, Mapping) else terms
        for variable, factor in pairs:
            if factor != 0.0:
                self._rows.append(len(self.row_lower))
                self._columns.append(variable)
                self._values.append(factor)
        self.row_lower.append(low)
        self.row_upper.append(high)

    def solve(self, gap: float = 0.0, nodes: int = NODES) -> Floats | None:
        """The variables at least cost; None: no values that keep all rows were found.

        Where some are whole: within a relative gap, or the best after so many nodes of branch and bound.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import coo_array
        except ImportError as error:
            raise MagisError(
                "comparing with other planners needs scipy", hint="pip install -c constraints.txt scipy"
            ) from error
        count = len(self.costs)
        if count == 0:
            kept = all(low <= 0.0 <= high for low, high in zip(self.row_lower, self.row_upper, strict=True))
            return np.zeros(0) if kept else None
        rows = []
        if self.row_lower:
            shape = (len(self.row_lower), count)
            matrix = coo_array((self._values, (self._rows, self._columns)), shape=shape).tocsr()
            rows = [LinearConstraint(matrix, self.row_lower, self.row_upper)]
        # Without presolve: the heuristics of integer programs print lines of their own about what it left of them.
        found = milp(
            np.array(self.costs),
            integrality=np.array(self.whole, dtype=np.uint8),
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            constraints=rows,
            options={"mip_rel_gap": gap, "node_limit": nodes, "presolve": not any(self.whole)},
        )
        if found.x is None:
            return None
        values: Floats = np.asarray(found.x, dtype=np.float64)
        return values
