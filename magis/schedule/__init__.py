"""Orders of the operators."""
