"""Plans for several ranks: each rank captures its own step, and ranks with equal steps run one plan."""
