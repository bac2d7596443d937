"""The command `magis`: what is done outside of a test run."""
