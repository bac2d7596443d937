"""Switches on pytester for the tests; whatever a user of the plugin needs is in the installed plugin."""

pytest_plugins = ["pytester"]
