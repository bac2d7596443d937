"""Peaks per rank without hardware: the rank's own code on fake tensors, every storage followed."""

from magis.extensions.ranks.prediction.live_storage import LiveStorage
from magis.extensions.ranks.prediction.rank_memory import RankPeak, fake_world, predict_rank, rank_peak

__all__ = ["LiveStorage", "RankPeak", "fake_world", "predict_rank", "rank_peak"]
