# SPDX-License-Identifier: Apache-2.0
"""How long fuzzes run: a small part with the suite, the long one with `make fuzz`."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """How many examples to try: `count`, or RADIXKV_FUZZ times as many."""
    return count * int(os.environ.get("RADIXKV_FUZZ", "1"))
