"""Functions for users' own loops: `magis.optimize`, `torch.compile`, checkpoint policies, fits, profiles."""
