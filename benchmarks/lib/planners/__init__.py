"""What others would plan for the same step: comparisons, used by no plan of ours. Solved by scipy."""
