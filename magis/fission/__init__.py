"""Fission (paper, F-Trans): sub-graphs cut along a dimension, their parts run one after another."""
