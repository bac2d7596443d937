"""Users' tests that are gated: those marked `magis`, and those that use a fixture. Loaded on first use."""
