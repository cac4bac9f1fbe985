"""TextDecoder: what an incremental decoder does, for those who are given one."""

from __future__ import annotations

from typing import Protocol


class TextDecoder(Protocol):
    """The text of one growing sequence of token ids; what it gives concatenates to the whole text."""

    def push(self, token_ids: list[int]) -> str:
        """Add ids and return the text that they complete, possibly empty."""
        ...

    def finish(self) -> str:
        """No more ids come: the text that was held back, possibly empty."""
        ...
