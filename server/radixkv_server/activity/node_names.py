# SPDX-License-Identifier: Apache-2.0
"""NodeNames: what clients call the nodes and blocks of the cache."""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache

MAX_KNOWN = 20_000  # names: 3 MB


class NodeNames:
    """Names of nodes and blocks that tell nothing of their place; the same while the server runs."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        # A tree that is looked at again and again has mostly the nodes that it had.
        self._known = lru_cache(MAX_KNOWN)(self._compute)

    def of(self, number: int) -> str:
        """`n` and twelve hex digits."""
        return self._known(number)

    def _compute(self, number: int) -> str:
        digest = hashlib.blake2b(number.to_bytes(8, "little"), key=self._secret, digest_size=6)
        return "n" + digest.hexdigest()
