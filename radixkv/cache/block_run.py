# SPDX-License-Identifier: Apache-2.0
"""BlockRun: whole blocks of one text that follow one another, named so that every process knows them.

    |<------------------- tokens ------------------->|
    |--- start tokens ---|[ block ][ block ][ block ]|
                            one identity for each

Other memories than the pool are asked by identities. Identities propose, tokens decide: their data is
trusted if it is of the same tokens from the beginning on, and of the same namespace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey, shared_bytes
from radixkv.cache.states.checkpoint import GRID

_OF_STATE = b"state"  # after the identity of a block


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Whole blocks of one text in order; all of one namespace, or all public."""

    # The framed namespace; of public text the parts of it that say what computes its K/V.
    namespace: NamespaceKey
    is_public: bool  # whether it is public text
    # All token ids from the beginning of the text to the end of the last block, four bytes each.
    tokens: bytes
    start: int  # tokens before the first block
    identities: tuple[bytes, ...]  # of the blocks, see `radixkv.cache.block_identity`
    # The data of each "block" is the state of a model's state layers after its last token, not its K/V.
    is_state: bool = False

    def __len__(self) -> int:
        return len(self.identities)

    def __repr__(self) -> str:
        what = "states" if self.is_state else "blocks"
        return f"BlockRun({len(self)} {what} after {self.start} tokens)"

    @property
    def end(self) -> int:
        """Tokens up to the end of the last block."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return (self.end - self.start) // len(self) if len(self) else 0

    def states(self) -> BlockRun | None:
        """Return the states at the grid points inside a run, its end included; None: there are none.

        Their identities are those of the blocks that end there, and a mark. O(tokens).
        """
        first = (self.start // GRID + 1) * GRID
        count = (self.end - first) // GRID + 1
        if not len(self) or count <= 0:
            return None
        ends = range(first, first + count * GRID, GRID)
        return BlockRun(
            self.namespace,
            self.is_public,
            self.tokens[: ends[-1] * TOKEN_BYTES],
            first - GRID,
            tuple([self.identities[(end - self.start) // self.block_size - 1] + _OF_STATE for end in ends]),
            is_state=True,
        )

    def tokens_of(self, index: int) -> bytes:
        """Return the token ids of one of its blocks. O(block)."""
        size = self.block_size * TOKEN_BYTES
        start = self.start * TOKEN_BYTES + index * size
        return self.tokens[start : start + size]

    def part(self, first: int, stop: int) -> BlockRun:
        """Return the run of its blocks [first, stop). O(tokens)."""
        size = self.block_size
        return replace(
            self,
            tokens=self.tokens[: (self.start + stop * size) * TOKEN_BYTES],
            start=self.start + first * size,
            identities=self.identities[first:stop],
        )

    def shared_end(self, other: BlockRun) -> int:
        """Count the leading tokens that both texts share, up to a block's end; 0: their owners differ.

        O(tokens).
        """
        if self.namespace != other.namespace or self.is_public != other.is_public:
            return 0
        shared = shared_bytes(self.tokens, other.tokens) // TOKEN_BYTES
        return shared - shared % self.block_size

    def is_same_text(self, other: BlockRun, num_tokens: int) -> bool:
        """Return True if the first `num_tokens` tokens and the namespaces are the same. O(tokens)."""
        end = num_tokens * TOKEN_BYTES
        return (
            self.namespace == other.namespace
            and self.is_public == other.is_public
            and self.tokens[:end] == other.tokens[:end]
        )
