"""The command `magis`: tools beside the pytest plugin."""
