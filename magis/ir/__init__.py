"""The graph: operators, values, storages; its rules (verify) and its text form."""

from magis.ir.text import GraphTextError, digest, dump, parse
from magis.ir.types import (
    GENERATOR,
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
from magis.ir.verify import verify

__all__ = [
    "GENERATOR",
    "ITEM_SIZE", "PERSISTENT_KINDS", "Arg", "Const", "Graph", "GraphTextError", "Op", "Ref", "Scalar", "Storage",
    "Value", "digest", "dump", "parse", "replace_refs", "verify",
]  # fmt: skip
