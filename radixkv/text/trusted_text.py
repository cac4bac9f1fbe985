# SPDX-License-Identifier: Apache-2.0
"""TrustedText: text of a message in which some pieces may mean control tokens.

Text of users never means control tokens (`radixkv.text.control_tokens`). Where the server itself writes an
earlier call into a message, the marks around it are the server's, and the model had generated them as tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Pieces of a text, each with whether it may mean a control token.
Pieces = tuple[tuple[str, bool], ...]


class TrustedText(str):
    """A text that remembers its pieces. Operations on it give plain text.

    >>> text = TrustedText.of([("<call>", True), ("<call>", False)])
    >>> text, text.pieces, type(text + "")
    ('<call><call>', (('<call>', True), ('<call>', False)), <class 'str'>)

    Attributes:
        pieces: see `Pieces`.
    """

    pieces: Pieces

    @classmethod
    def of(cls, pieces: Iterable[tuple[str, bool]]) -> TrustedText:
        """Return the text of these pieces."""
        given = tuple(pieces)
        text = cls("".join(piece for piece, _ in given))
        text.pieces = given
        return text

    @classmethod
    def parted(cls, before: str, written: str, mark: str, tokens: Iterable[str]) -> TrustedText:
        """Return a text after another one that is not trusted.

        Args:
            written: the text, in which `mark` and a number stand around each trusted token.
            tokens: the trusted tokens, by number.
        """
        known = {str(number): token for number, token in enumerate(tokens)}
        pieces = [(before, False)]
        for place, part in enumerate(written.split(mark)):
            pieces.append((known[part], True) if place % 2 else (part, False))
        return cls.of((piece, is_trusted) for piece, is_trusted in pieces if piece)
