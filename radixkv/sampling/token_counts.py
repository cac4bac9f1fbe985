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

    The arrays follow the history only when they are asked for: where a copy on the device counts
    (`DeviceCounts`), a token is no more than an entry of the history. A token whose count falls to 0 while
    the last ones are taken away is always the last of the array: those after it occurred for the first time
    later, and are gone already.

    Attributes:
        history: the tokens added after the first ones, in order.
        copied: how many of them a copy has counted, if there is one (`DeviceCounts`).
        taken_back: tokens that the copy has counted, too, and that were taken away again.
        place: row of the copy; -1: there is none.
        fed: of what the copy has counted before the host knew it: list of a step's tokens, empty until they
            are known; None: nothing.
        fed_at: the place there.
    """

    __slots__ = (
        "__weakref__",
        "_counted",
        "_counts",
        "_size",
        "_tokens",
        "_where",
        "copied",
        "fed",
        "fed_at",
        "history",
        "place",
        "taken_back",
    )

    def __init__(self) -> None:
        self._tokens = np.empty(16, dtype=np.int64)
        self._counts = np.empty(16, dtype=np.float32)
        self._size = 0
        self._where: dict[int, int] = {}
        self._counted = 0  # tokens of the history that the arrays have
        self.history: list[int] = []
        self.copied = 0
        self.taken_back: list[int] = []
        self.place = -1
        self.fed: list[int] | None = None
        self.fed_at = 0

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

    def __bool__(self) -> bool:
        return self._size > 0 or len(self.history) > 0

    def __len__(self) -> int:
        self._follow()
        return self._size

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens, each once. O(tokens since the last call)."""
        self._follow()
        return self._tokens[: self._size]

    @property
    def counts(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """How often each of `tokens` occurred. O(tokens since the last call)."""
        self._follow()
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a token. O(1)."""
        self.history.append(token_id)

    def remove(self, count: int) -> None:
        """Take the last `count` tokens away. O(count)."""
        for _ in range(count):
            token = self.history.pop()
            if self.copied > len(self.history):
                self.copied -= 1
                self.taken_back.append(token)
            if self._counted > len(self.history):
                self._counted -= 1
                self._take_away(token)

    def _follow(self) -> None:
        """Count in the arrays what was added since."""
        for token in self.history[self._counted :]:
            place = self._where.setdefault(token, self._size)
            if place == self._size:
                if place == len(self._tokens):
                    self._tokens = np.resize(self._tokens, 2 * place + 16)
                    self._counts = np.resize(self._counts, 2 * place + 16)
                self._tokens[place], self._counts[place] = token, 0.0
                self._size += 1
            self._counts[place] += 1.0
        self._counted = len(self.history)

    def _take_away(self, token: int) -> None:
        place = self._where[token]
        self._counts[place] -= 1.0
        if self._counts[place] == 0.0:
            assert place == self._size - 1
            self._size = place
            del self._where[token]

    def copy(self) -> TokenCounts:
        """Return equal counts with a future of their own. O(tokens)."""
        other = TokenCounts()
        other._tokens, other._counts = self._tokens.copy(), self._counts.copy()
        other._size, other._where, other.history = self._size, dict(self._where), list(self.history)
        other._counted = self._counted
        return other

    def __deepcopy__(self, memo: object) -> TokenCounts:
        return self.copy()  # the copy on the device is this one's alone
