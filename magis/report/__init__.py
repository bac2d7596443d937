"""Reports: results.csv, JSON and SVG of Pareto fronts, time lines, atomic file writes.

Imports neither torch nor pandas; pandas is imported to read a table.
"""

from magis.atomic_files import check_writable, read_regular, write_text_atomically
from magis.report.pictures import front_svg, front_text, trace_text
from magis.report.results_table import (
    COLUMNS,
    OWN_COLUMNS,
    SEED_COLUMNS,
    Cell,
    append_rows,
    read_results,
    row_from_result,
    write_csv,
)

__all__ = [
    "COLUMNS",
    "OWN_COLUMNS",
    "SEED_COLUMNS",
    "Cell",
    "append_rows",
    "check_writable",
    "front_svg",
    "front_text",
    "read_regular",
    "read_results",
    "row_from_result",
    "trace_text",
    "write_csv",
    "write_text_atomically",
]
