# SPDX-License-Identifier: Apache-2.0
"""Occurrences of tokens in a request, as penalties need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from radixkv.images.placed_image import FIRST_IMAGE_ID

#: A list of ids, or an integer array.
TokenIds = Sequence[int] | np.ndarray[Any, Any]


class TokenCounts:
    """Occurrences of some tokens, as arrays; the last tokens added can be taken away again.

        tokens   7  3  9            in the order of their first occurrence
        counts   2  1  1            so 7 3 7 9 were added

    A token whose count falls to 0 while the last ones are taken away is always the last of the array: those
    after it occurred for the first time later, and are gone already.

    Attributes:
        history: the tokens added after the first ones, in order.
        copied: how many of them a copy has counted, if there is one (`DeviceCounts`).
        taken_back: tokens that the copy has counted, too, and that were taken away again.
    """

    __slots__ = ("__weakref__", "_counts", "_size", "_tokens", "_where", "copied", "history", "taken_back")

    def __init__(self) -> None:
        self._tokens = np.empty(16, dtype=np.int64)
        self._counts = np.empty(16, dtype=np.float32)
        self._size = 0
        self._where: dict[int, int] = {}
        self.history: list[int] = []
        self.copied = 0
        self.taken_back: list[int] = []

    @classmethod
    def of(cls, token_ids: TokenIds) -> TokenCounts:
        """Return the counts of a prompt's text; its tokens can't be taken away. O(n log n)."""
        counts = cls()
        ids = np.asarray(token_ids, dtype=np.int64)
        counts._tokens, found = np.unique(ids[ids < FIRST_IMAGE_ID], return_counts=True)
        counts._counts = found.astype(np.float32)
        counts._size = len(counts._tokens)
        counts._where = {token: i for i, token in enumerate(counts._tokens.tolist())}
        return counts

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._tokens[: self._size]

    @property
    def counts(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        place = self._where.setdefault(token_id, self._size)
        if place == self._size:
            if place == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * place + 16)
                self._counts = np.resize(self._counts, 2 * place + 16)
            self._tokens[place], self._counts[place] = token_id, 0.0
            self._size += 1
        self._counts[place] += 1.0
        self.history.append(token_id)

    def remove(self, count: int) -> None:
        for _ in range(count):
            token = self.history.pop()
            if self.copied > len(self.history):
                self.copied -= 1
                self.taken_back.append(token)
            place = self._where[token]
            self._counts[place] -= 1.0
            if self._counts[place] == 0.0:
                assert place == self._size - 1
                self._size = place
                del self._where[token]

    def copy(self) -> TokenCounts:
        other = TokenCounts()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._size, other._where, other.history = self._size, dict(self._where), list(self.history)
        return other
