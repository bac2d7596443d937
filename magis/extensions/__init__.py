"""Neighbours of the core: each can be taken away, and is reached through `magis.registry` alone."""
