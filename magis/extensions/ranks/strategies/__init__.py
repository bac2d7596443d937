"""Distributed strategies for comparison: data parallelism, sharding, tensor and pipeline parallelism."""
