"""What a run shows and writes: the terminal's table, results.csv, the progress line."""
