"""PublicPrefixes: prompts' beginnings that all namespaces share.

The tokens of a public prefix hang below a root of their own; what namespaces cached behind it hangs there as
each one's `foreign` children, so that it stays private.
"""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES
from radixkv.cache.node import Space


class PublicPrefixes:
    """The declared prefixes, as bytes of whole blocks.

    Args:
        space: the namespace that public blocks belong to.
        block_bytes: bytes of a block's token ids.

    Attributes:
        prefixes: longest first.
        version: changes with each declaration.
    """

    __slots__ = ("_size", "prefixes", "space", "version")

    def __init__(self, space: Space, block_bytes: int) -> None:
        self.space = space
        self.prefixes: list[bytes] = []
        self.version = 0
        self._size = block_bytes

    def __len__(self) -> int:
        return len(self.prefixes)

    def _whole_blocks(self, data: bytes) -> bytes:
        return data[: len(data) - len(data) % self._size]

    def add(self, data: bytes) -> int:
        """Declare the whole blocks of `data` public; returns their length in bytes."""
        data = self._whole_blocks(data)
        if data and data not in self.prefixes:
            self.prefixes.append(data)
            self.prefixes.sort(key=len, reverse=True)
            self.version += 1
        return len(data)

    def discard(self, data: bytes) -> bool:
        """Take a declaration back; False: there was none."""
        data = self._whole_blocks(data)
        if data not in self.prefixes:
            return False
        self.prefixes.remove(data)
        self.version += 1
        return True

    def length_in(self, data: bytes) -> int:
        """Length in bytes of the longest public prefix of `data`. O(public prefixes)."""
        for prefix in self.prefixes:
            if data.startswith(prefix):
                return len(prefix)
        return 0

    def seed_and_mark(self, data: bytes, space: Space, depth: int) -> tuple[int, int]:
        """What the prefix hash of the block behind the first `depth` tokens of a prompt starts from."""
        public = self.length_in(data) if self.prefixes else 0
        if not public:
            return space.seed, 0
        return self.space.seed, self.space.seed ^ space.seed if depth * TOKEN_BYTES >= public else 0
