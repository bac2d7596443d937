"""Reports: results.csv, JSON and SVG of Pareto fronts, time lines, atomic file writes.

Imports neither torch nor pandas; pandas is imported to read a table.
"""

from magis.atomic_files import check_writable, read_regular, write_text_atomically
from magis.report.axes import LinearScale, byte_scale, time_scale
from magis.report.pictures import front_svg, front_text, thinned, thinned_timelines, trace_text
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
    "LinearScale",
    "append_rows",
    "byte_scale",
    "check_writable",
    "front_svg",
    "front_text",
    "read_regular",
    "read_results",
    "row_from_result",
    "thinned",
    "thinned_timelines",
    "time_scale",
    "trace_text",
    "write_csv",
    "write_text_atomically",
]
