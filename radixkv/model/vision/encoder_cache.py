# SPDX-License-Identifier: Apache-2.0
"""EncoderCache: the rows of encoded images, within a bound on bytes.

A row is needed by the chunk of a prompt that computes its token, and never again while that token's K/V is
cached. What was left out for room, or lost with a failed step, is encoded again: requests hold nothing here,
so that none can wait for another one's images, and an aborted one leaves nothing behind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoding:
    """An encoded image.

    Attributes:
        rows: [tokens, hidden], in place of the embeddings of its tokens.
        deep: of the same shape, added behind the first layers.
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.rows, *self.deep))


class EncoderCache:
    """The latest encodings by key; the least recently used ones make room.

    Args:
        max_bytes: of all encodings; the latest one stays even if it is larger.

    Attributes:
        num_bytes: of the encodings that are there.
        num_evicted: encodings that made room for others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._encodings: OrderedDict[Hashable, Encoding] = OrderedDict()
        self.num_bytes = self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._encodings)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._encodings

    def get(self, key: Hashable) -> Encoding | None:
        """Return an encoding, which becomes the latest; None: it is not there. O(1)."""
        found = self._encodings.get(key)
        if found is not None:
            self._encodings.move_to_end(key)
        return found

    def put(self, key: Hashable, encoding: Encoding) -> None:
        """Keep an encoding that is not there. O(those that make room)."""
        assert key not in self._encodings
        self._encodings[key] = encoding
        self.num_bytes += encoding.num_bytes
        while self.num_bytes > self._max_bytes and len(self._encodings) > 1:
            _, dropped = self._encodings.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self.num_evicted += 1

    def clear(self) -> None:
        """Drop all encodings."""
        self._encodings.clear()
        self.num_bytes = 0

    def check(self) -> None:
        """Assert that the count of bytes is right and within the bound."""
        assert self.num_bytes == sum(each.num_bytes for each in self._encodings.values())
        assert self.num_bytes <= self._max_bytes or len(self._encodings) == 1
