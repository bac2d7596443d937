"""TASO rules: aggregation and algebraic identities (paper), a table of ``before -> after``."""
