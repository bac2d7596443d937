"""The graph of a step: operators, values, storages; verification and text form."""

from magis.graph.nodes import (
    ARRIVED,
    BESIDE,
    BITS,
    GENERATOR,
    HOST_COPIES,
    ITEM_SIZE,
    NUMBER,
    PERSISTENT_KINDS,
    STRETCH,
    Arg,
    Const,
    Graph,
    Loop,
    Op,
    Ref,
    Scalar,
    Storage,
    Value,
    every_op,
    named_numbers,
    replace_refs,
    with_inputs,
    with_scalars,
)
from magis.graph.text import GraphTextError, digest, dump, parse
from magis.graph.verify import verify

__all__ = [
    "ARRIVED", "BESIDE", "BITS", "GENERATOR", "HOST_COPIES",
    "ITEM_SIZE", "NUMBER", "PERSISTENT_KINDS", "STRETCH", "Arg", "Const", "Graph", "GraphTextError", "Loop", "Op",
    "Ref", "Scalar", "Storage", "Value", "digest", "dump", "every_op", "named_numbers", "parse", "replace_refs",
    "verify", "with_inputs", "with_scalars",
]  # fmt: skip
