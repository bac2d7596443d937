"""The command `magis`: command-line tools besides the pytest plugin."""
