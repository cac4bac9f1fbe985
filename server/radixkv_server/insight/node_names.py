"""NodeNames: what clients call the nodes and blocks of the cache."""

from __future__ import annotations

import hashlib
import secrets


class NodeNames:
    """Names of nodes and blocks that tell nothing of their place; the same while the server runs."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)

    def of(self, number: int) -> str:
        """`n` and twelve hex digits."""
        digest = hashlib.blake2b(number.to_bytes(8, "little"), key=self._secret, digest_size=6)
        return "n" + digest.hexdigest()
