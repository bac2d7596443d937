"""pytest plugin: a memory-regression gate for PyTorch training steps (see `pytest_magis.plugin`)."""
