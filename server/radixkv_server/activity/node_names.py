# SPDX-License-Identifier: Apache-2.0
"""NodeNames: names of the cache's nodes and blocks for clients."""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache

MAX_KNOWN = 20_000  # names: 3 MB


class NodeNames:
    """Opaque names of nodes and blocks, stable while the server runs."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)
        # A tree that is looked at again and again has mostly the nodes that it had.
        self._known = lru_cache(MAX_KNOWN)(self._compute)

    def of(self, number: int) -> str:
        """Return a name: `n` and twelve hex digits."""
        return self._known(number)

    def _compute(self, number: int) -> str:
        digest = hashlib.blake2b(number.to_bytes(8, "little"), key=self._secret, digest_size=6)
        return "n" + digest.hexdigest()
