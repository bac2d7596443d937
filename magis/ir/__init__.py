"""The graph: operators, values, storages; its rules (verify) and its text form."""

from magis.ir.types import (
    ITEM_SIZE,
    PERSISTENT_KINDS,
    Arg,
    Const,
    Graph,
    Op,
    Ref,
    Scalar,
    Storage,
    Value,
    replace_refs,
)

__all__ = [
    "ITEM_SIZE", "PERSISTENT_KINDS", "Arg", "Const", "Graph", "Op", "Ref", "Scalar", "Storage", "Value",
    "replace_refs",
]  # fmt: skip
