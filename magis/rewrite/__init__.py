"""Graph to graph: normal form for the search, and the realization of its plans."""
