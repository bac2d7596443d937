"""`torch.compile(model, backend="magis")`: forward and backward of a user's own loop, planned for less memory."""
