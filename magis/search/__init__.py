"""Search for plans: which tensors to keep, recompute or swap, and the order of the operators."""
