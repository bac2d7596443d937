"""What users call on their own loops: `magis.optimize`, `torch.compile`, checkpoint policies, fits, profiles."""
