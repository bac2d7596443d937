"""The ways to run a training step that users compare with magis: each makes the step of a workload on a rank."""

from magis.strategies.base import RankStep, Technique, World, batch_size, share_of_batch

__all__ = ["RankStep", "Technique", "World", "batch_size", "share_of_batch"]
