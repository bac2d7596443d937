"""Fission (paper, F-Trans): regions split along a dimension into parts that run one after another."""
