"""The version, in this one place: the build reads the literal without importing anything."""

__version__ = "0.1.0"
