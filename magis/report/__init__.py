"""Reports: results.csv, plain JSON forms of results, and writing files so that they are always whole.

Imports neither torch nor pandas; pandas is loaded when a table is written or read.
"""

from magis.report.files import check_writable, write_text_atomically
from magis.report.plain import from_plain, to_plain
from magis.report.table import (
    COLUMNS,
    OWN_COLUMNS,
    SEED_COLUMNS,
    Cell,
    append_rows,
    read_csv,
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
    "from_plain",
    "read_csv",
    "row_from_result",
    "to_plain",
    "write_csv",
    "write_text_atomically",
]
