"""Plans: which tensors to keep, to recompute, to swap, and in which order to run."""
