"""Reports: results.csv, plain JSON forms of results, fronts and their pictures, time lines; files that are whole.

Imports neither torch nor pandas; pandas is loaded when a table is written or read.
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
