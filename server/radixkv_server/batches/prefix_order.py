# SPDX-License-Identifier: Apache-2.0
"""Order of prompts in which each shared prefix is met once: depth first through the tree of their pieces."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

#: Tokens of a piece. Smaller ones order prompts that part late more exactly, and take more memory.
PIECE_TOKENS = 32


class PrefixOrder:
    """A tree of all prompts' pieces of 32 tokens, with a number for each piece after its prefix.

    Sorted by their keys, prompts come in the tree's depth-first order, siblings in the order in which they
    were first seen: prompts with a common prefix are neighbours, whatever came between them. Memory: one
    entry for each distinct piece, so a shared prefix takes as much as one prompt.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}

    def key(self, token_ids: Sequence[int]) -> bytes:
        """Return the sort key of a prompt. O(tokens)."""
        packed = array("I", token_ids)
        numbers, parent = array("I"), 0
        for start in range(0, len(packed), PIECE_TOKENS):
            piece = packed[start : start + PIECE_TOKENS].tobytes()
            parent = self._numbers.setdefault((parent, piece), len(self._numbers) + 1)
            numbers.append(parent)
        if sys.byteorder == "little":
            numbers.byteswap()  # so that bytes compare as the numbers do
        return numbers.tobytes()
