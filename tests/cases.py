"""How many cases tests with random cases try: few in the tier `core`, and `HALFSILVER_CASES` times as many at night."""

from __future__ import annotations

import os

MANY = int(os.environ.get("HALFSILVER_CASES", "1"))
