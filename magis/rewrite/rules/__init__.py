"""TASO rules: aggregation and algebraic identities (PAPER), a table of ``before -> after``."""
