"""Optional outputs of a run: the HTML report, GitHub, pytest-benchmark, JUnit files."""
