"""Steps and blocks of code as memory snapshots, for torch's memory_viz and other viewers of these files."""
