# SPDX-License-Identifier: Apache-2.0
"""Occurrences of tokens in requests, kept where the logits are, so that a step sends the latest ones only.

    host     history of a request    7 3 9 | 7         what it has got; `copied` is 3 (`TokenCounts`)
    device   a row of the table      7 3 9 | ?         what was added to it; ? is chosen by a running step

A step that is launched before the tokens of the one before are known adds these on the device (`feed`). What
they were is compared with the request's next token the next time: one that the request has not got after all
is taken away again, and so are guesses that proved wrong, which `TokenCounts` notes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from radixkv.sampling.device_arrays import to_device
from radixkv.sampling.token_counts import TokenCounts, TokenIds

_FIRST_ROWS = 8
#: Logits for which temporary tensors are made at a time.
_LOGITS = 1 << 23


class DeviceCounts:
    """A table int32 [rows, V] of occurrences, a row for each `TokenCounts` in use. Not thread-safe.

    Which row that is, and what was fed to it, stands in the `TokenCounts`: they have one copy at most.
    """

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None
        self._free: list[int] = []
        self._latest: tuple[Sequence[TokenCounts], torch.Tensor | None] = (), None

    def update(self, members: Sequence[TokenCounts], like: torch.Tensor) -> None:
        """Bring the rows of some counts up to date with their histories. O(tokens since the last call).

        Where the fed tokens proved right, nothing is sent.

        Args:
            like: logits [R, V] of the table's device.
        """
        places: list[int] = []
        tokens: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        changes: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []

        def change(place: int, ids: TokenIds, by: int | TokenIds) -> None:
            own = np.asarray(ids, np.int64)
            places.extend([place] * len(own))
            tokens.append(own)
            changes.append(np.broadcast_to(np.asarray(by, np.int32), own.shape))

        for counts in members:
            history, copied, chosen = counts.history, counts.copied, counts.fed
            is_new = counts.place < 0
            if chosen is not None:
                counts.fed = None
                if not chosen:  # its step has failed: nobody knows what it added
                    assert self._table is not None
                    self._table[counts.place].zero_()
                    is_new = True
                elif copied < len(history) and history[copied] == chosen[counts.fed_at]:
                    counts.copied = copied = copied + 1
                else:
                    counts.taken_back.append(chosen[counts.fed_at])
            if counts.place < 0:
                self._latest = (), None  # it may be all that keeps rows of ended requests
                counts.place = self._new_row(counts, like)
            if is_new:
                change(counts.place, counts.tokens, counts.counts)
            elif counts.taken_back or copied < len(history):
                change(counts.place, counts.taken_back, -1)
                change(counts.place, history[copied:], 1)
            else:
                continue
            counts.copied, counts.taken_back = len(history), []
        if places:
            self._add(np.array(places, np.int64), np.concatenate(tokens), np.concatenate(changes), like)

    def feed(
        self, members: Sequence[TokenCounts], chosen: list[int], rows: Sequence[int], tokens: torch.Tensor
    ) -> None:
        """Count a token for each of some counts that are up to date, before the host knows it.

        Args:
            chosen: the tokens of a step, empty until they are known.
            rows: places of the members' tokens there.
            tokens: int64 [len(members)], the same on the device.
        """
        assert self._table is not None
        for counts, at in zip(members, rows, strict=True):
            counts.fed, counts.fed_at = chosen, at
        places = self._places(members, tokens.device)
        self._table.index_put_((places, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)

    def rows(self, members: Sequence[TokenCounts], like: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield counts int32 [N, V] of all members, N at a time, each with the index of its first member."""
        assert self._table is not None
        places = self._places(members, like.device)
        size = max(1, _LOGITS // like.shape[1])
        for start in range(0, len(members), size):
            yield start, self._table.index_select(0, places[start : start + size])

    def _places(self, members: Sequence[TokenCounts], device: torch.device) -> torch.Tensor:
        """Return rows int64 [len(members)] of the table; those of the latest members are kept."""
        latest, places = self._latest
        if places is None or members != latest:
            places = to_device([counts.place for counts in members], device)
            self._latest = members, places
        return places

    def _new_row(self, counts: TokenCounts, like: torch.Tensor) -> int:
        """Return a row of zeros, which is free again when the counts are gone."""
        if not self._free:
            old = self._table
            have = 0 if old is None else len(old)
            more = max(_FIRST_ROWS, have)
            zeros = torch.zeros(more, like.shape[1], dtype=torch.int32, device=like.device)
            self._table = zeros if old is None else torch.cat([old, zeros])
            self._free.extend(range(have + more - 1, have - 1, -1))
            place = self._free.pop()
        else:
            place = self._free.pop()
            assert self._table is not None
            self._table[place].zero_()
        weakref.finalize(counts, self._free.append, place)
        return place

    def _add(
        self,
        places: np.ndarray[tuple[int], np.dtype[np.int64]],
        tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
        changes: np.ndarray[tuple[int], np.dtype[np.int32]],
        like: torch.Tensor,
    ) -> None:
        assert self._table is not None
        # Ids are compared on the host: an index out of range would end a GPU's process.
        inside = (tokens >= 0) & (tokens < like.shape[1])
        index = tuple(to_device(each[inside], like.device) for each in (places, tokens))
        self._table.index_put_(index, to_device(changes[inside], like.device), accumulate=True)
