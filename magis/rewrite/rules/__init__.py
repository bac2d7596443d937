"""TASO rules (paper): aggregations and algebraic identities, a table of ``before -> after``."""
