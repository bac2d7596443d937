"""Costs of an operator: nanoseconds and workspace bytes, from a profile store or a roofline."""
