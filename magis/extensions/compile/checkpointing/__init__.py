"""Plans as policies of torch's selective activation checkpointing, for training loops that magis does not run."""
