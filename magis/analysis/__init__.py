"""Facts derived from a graph: liveness, hazards."""
