"""Outputs of a run beside the terminal and results.csv: the HTML report, GitHub, pytest-benchmark, JUnit files."""
