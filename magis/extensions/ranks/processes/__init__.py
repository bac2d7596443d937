"""Processes that run ranks: starting, commands, and cleanup."""
