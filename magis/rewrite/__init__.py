"""Graph transformations: the normal form for the search, and the realization of plans."""
