"""Fission (PAPER, F-Trans; DESIGN section 5): sub-graphs cut along a dimension, their parts run one after another."""
