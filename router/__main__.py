"""`python -m router` is the `headwater` command."""

from __future__ import annotations

import sys

from router.main import main

sys.exit(main())
