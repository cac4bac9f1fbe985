"""TokenTexts: bounded pieces of text out of token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TokenTexts:
    """Any thread may use it; 0.1 to 0.5 us a token.

    Args:
        token_bytes: what a token adds to a text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._bytes_of = token_bytes

    def raw(self, token_ids: Sequence[int]) -> bytes:
        """What the tokens add to a text, control tokens spelt out."""
        return b"".join(map(self._bytes_of, token_ids))

    def text(self, token_ids: Sequence[int]) -> str:
        """The same as text; where it begins or ends within a character stands U+FFFD."""
        return self.raw(token_ids).decode("utf-8", "replace")
