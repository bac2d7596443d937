"""Predicted peak memory and time of ranks without their hardware, from runs on fake tensors."""
