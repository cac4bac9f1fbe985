# SPDX-License-Identifier: Apache-2.0
"""PromptBlocks: the keys of a prompt's whole blocks, in the namespaces where its requests find them."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from radixkv.cache.block_identity import IDENTITY_BYTES, each_identity
from radixkv.cache.keys import TOKEN_BYTES, NamespaceName, TokenIds, encode_tokens, frame_namespace
from radixkv.cluster.events.block_keys import NO_CHAIN, PUBLIC, BlockKeys, block_key, chains

#: Most blocks of a prompt that are compared: shared blocks beyond them no longer change the choice.
MAX_BLOCKS = 1 << 15


class PromptBlocks:
    """A prompt in the form that all replicas are asked for. Chains and keys are computed once, when needed.

    Args:
        token_ids: of the prompt, at least one.
        namespace: whose it is, see `radixkv.cache.keys`; public text is found in each.

    Raises:
        InvalidRequestError: no token ids, or no namespace.
    """

    def __init__(self, keys: BlockKeys, token_ids: TokenIds, namespace: NamespaceName = "") -> None:
        self._data = encode_tokens(token_ids)
        self.num_tokens = len(token_ids)
        self.owner = keys.owner(frame_namespace(namespace))
        self._owners = (self.owner, keys.owner(PUBLIC))
        self._chains: dict[int, bytearray] = {}  # by block size
        self._own_keys: dict[int, list[int]] = {}
        self._all_keys: dict[int, list[tuple[int, ...]]] = {}
        self._keys: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def digest(self) -> int:
        """Of all its tokens, 32 bits."""
        return xxhash.xxh32_intdigest(self._data)

    def count(self, block_size: int) -> int:
        """Return the number of its whole blocks, at most `MAX_BLOCKS`."""
        return min(self.num_tokens // block_size, MAX_BLOCKS)

    def keys(self, block_size: int, index: int) -> tuple[int, ...]:
        """The keys that a block may have: its owner's, and that of public text. The first call O(tokens)."""
        found = self._keys.get((block_size, index))
        if found is None:
            (link,) = self.links(block_size, index, index + 1)
            found = tuple([block_key(owner, link) for owner in self._owners])
            self._keys[block_size, index] = found
        return found

    def own_keys(self, block_size: int) -> Sequence[int]:
        """Keys of all blocks, of its owner. The first call O(tokens)."""
        found = self._own_keys.get(block_size)
        if found is None:
            owner, links = self.owner, self.links(block_size, 0, self.count(block_size))
            found = self._own_keys[block_size] = [block_key(owner, link) for link in links]
        return found

    def all_keys(self, block_size: int) -> Sequence[tuple[int, ...]]:
        """The same of all blocks. The first call O(tokens)."""
        found = self._all_keys.get(block_size)
        if found is None:
            found = [self.keys(block_size, index) for index in range(self.count(block_size))]
            self._all_keys[block_size] = found
        return found

    def links(self, block_size: int, start: int, stop: int) -> tuple[bytes, ...]:
        """Names of the blocks from `start` on before they are keyed. The first call O(tokens)."""
        chain = self._chains.get(block_size)
        if chain is None:
            looked_at = self._data[: self.count(block_size) * block_size * TOKEN_BYTES]
            chain = self._chains[block_size] = chains(block_size).chain(NO_CHAIN, looked_at)
        return each_identity(chain[start * IDENTITY_BYTES : stop * IDENTITY_BYTES])
