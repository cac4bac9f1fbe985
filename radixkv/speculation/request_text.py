# SPDX-License-Identifier: Apache-2.0
"""RequestText: guesses from a request's own tokens, its cached continuation and its prediction."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

import numpy as np

from radixkv.scheduling.sequence import Sequence
from radixkv.speculation.acceptance import Acceptance
from radixkv.speculation.text_index import LONGEST_MATCH, TextIndex

#: Searched tokens of a prompt, at most.
MAX_INDEXED = 32_768
#: Tokens of a cached continuation that are read at a time.
_PAGE = 64
_LONGEST_WAIT = 64

#: Function of a request and a number: at most that many cached tokens after the request's text.
Continuation = Callable[[Sequence, int], abc.Sequence[int]]


class RequestText:
    """The text of one request so far, and its place in texts that it may be repeating.

        script     s0 s1 s2 s3 s4 s5        a text that the request has followed token for token:
                         ^ at               the next guess is s3

    Attributes:
        context: the request's last tokens.
        acceptance: rate of its right guesses.
        match: length of the match behind the latest draft; 0: there was no such draft.
    """

    __slots__ = (
        "_at",
        "_length",
        "_look_at",
        "_own",
        "_prediction",
        "_script",
        "_wait",
        "acceptance",
        "context",
        "match",
    )

    def __init__(self, request: Sequence) -> None:
        prediction = request.params.prediction
        tokens = request.tokens(max(0, request.num_tokens - MAX_INDEXED))
        self._own = TextIndex(tokens)
        self._length = request.num_tokens
        self._prediction = TextIndex(np.asarray(prediction, dtype=np.int32)) if prediction else None
        # The prediction is taken as the answer's beginning until it turns out otherwise.
        output = request.output_token_ids()
        follows = prediction is not None and list(prediction[: len(output)]) == output
        self._script: abc.Sequence[int] = prediction if follows and prediction else ()
        self._at = len(output)
        self._look_at, self._wait = 0, 1
        self.context: list[int] = tokens[-LONGEST_MATCH:].tolist()
        self.acceptance = Acceptance(request.params.is_greedy)
        self.match = 0

    def catch_up(self, request: Sequence) -> None:
        """Add the request's new tokens. O(new tokens)."""
        new = request.tokens(self._length).tolist()
        self._length = request.num_tokens
        for token_id in new:
            self._own.append(token_id)
            if self._at < len(self._script) and self._script[self._at] == token_id:
                self._at += 1
            else:
                self._script, self._at = (), 0
        self.context = (self.context + new)[-LONGEST_MATCH:]

    def follow(self, request: Sequence, most: int, continuation: Continuation) -> list[int]:
        """Return the next tokens of the repeated text: its cached continuation, or the prediction.

        The cache is asked when the repeated text ends; while it knows nothing, after ever longer pauses.
        """
        left = len(self._script) - self._at
        if left <= 0 and self._length >= self._look_at:
            self._script, self._at = continuation(request, _PAGE), 0
            self._wait = 1 if self._script else min(2 * self._wait, _LONGEST_WAIT)
            self._look_at = self._length + self._wait
        return list(self._script[self._at : self._at + most])

    def find(self, most: int) -> tuple[list[int], int]:
        """Return the tokens after the request's last ones in the prediction, or earlier in its own text."""
        best: tuple[list[int], int] = [], 0
        if self._prediction is not None:
            position, length = self._prediction.find(self.context)
            if length:
                best = self._prediction.read(position, most), length
        position, length = self._own.find(self.context, inside=True)
        if length > best[1]:
            best = self._own.read(position, most), length
        return best
