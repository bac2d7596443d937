"""Gated tests of users: those marked `magis`, and those that use a fixture. Loaded on first use."""
