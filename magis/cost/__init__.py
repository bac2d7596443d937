"""Costs of an operator: nanoseconds and workspace bytes, from an operator profile or a roofline."""
