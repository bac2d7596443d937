"""Tests of users that are gated: those marked `magis`, and those that use the fixture `magis`. Loaded on first use."""
