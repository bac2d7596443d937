"""Entry point of `python -m magis`, which runs the command `magis`."""

from __future__ import annotations

import sys

from magis.cli.main import main

sys.exit(main())
