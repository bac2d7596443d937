"""Strategies of several ranks that users compare with: sharding, tensor and pipeline parallelism."""
