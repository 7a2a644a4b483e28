"""``python -m sparse_mla``: the command line, for environments whose scripts folder is not on the PATH."""

from __future__ import annotations

import sys

from .cli.main import main

sys.exit(main())
