"""One case of the gate: captured, planned, run, compared with eager, and told in figures."""
