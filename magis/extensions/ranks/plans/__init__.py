"""Plans across ranks: each captures its own step, those with the same step run one plan."""
