# SPDX-License-Identifier: Apache-2.0
"""Block identities: one chained hash for every whole block, which all that is keyed by prefixes reads.

    seed of a namespace       hash of the model that computes its K/V, and the owner; public: the model alone
    identity of a block       hash of the previous identity (for the first block: the seed) and its token ids
    after public text        the first private block follows a hash of the public identity and the seed

An identity is computed once, when its block is committed, and kept beside the node's blocks. Equal prefixes
of one namespace have equal identities in every process. Identities propose, tokens decide: nothing is cached,
pinned or in flight on their word alone. Only for text that has left the cache, whose tokens are gone, do they
decide.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import xxhash

from radixkv.cache.keys import NamespaceKey

IDENTITY_BYTES = 16

HashFunction = Callable[[bytes], int]

_OWNER_PARTS = 2  # of a namespace that say whose it is; those that follow say what computes
_MAX_CUT = 64  # blocks that are cut out of a run by one call, the quickest way
_MASK = (1 << 8 * IDENTITY_BYTES) - 1


def what_computes(key: NamespaceKey) -> NamespaceKey:
    """Return the parts of a namespace that say what computes its K/V: those after (tenant, salt)."""
    return key[_OWNER_PARTS:]


class _Cutters(dict[int, Callable[[bytes | bytearray], tuple[bytes, ...]]]):
    """count -> a function that cuts `count` pieces of one size off a buffer: the quickest way to do it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __missing__(self, count: int) -> Callable[[bytes | bytearray], tuple[bytes, ...]]:
        self[count] = cut = Struct(f"{self._size}s" * count).unpack_from
        return cut


_cut_identities = _Cutters(IDENTITY_BYTES)
_each_one = Struct(f"{IDENTITY_BYTES}s").iter_unpack


def each_identity(ids: bytes | bytearray) -> tuple[bytes, ...]:
    """Return a run's identities one by one. O(blocks)."""
    count = len(ids) // IDENTITY_BYTES
    if count > _MAX_CUT:
        return tuple([identity for (identity,) in _each_one(ids)])
    return _cut_identities[count](ids)


class BlockIdentities:
    """Computes identities.

    Args:
        hash_function: bytes -> int, used instead of xxh3_128.
    """

    __slots__ = ("_cut", "_digest", "_size")

    def __init__(self, block_bytes: int, hash_function: HashFunction | None = None) -> None:
        self._digest: Callable[[bytes | bytearray], bytes] = xxhash.xxh3_128_digest
        if hash_function is not None:
            self._digest = lambda data: (hash_function(bytes(data)) & _MASK).to_bytes(
                IDENTITY_BYTES, "little"
            )
        self._size = block_bytes  # bytes of a block's token ids
        self._cut = _Cutters(block_bytes)

    def seed(self, key: NamespaceKey) -> bytes:
        """Return the identity that the first block of a namespace follows.

        Each part is framed by its length, and each half by its number of parts.
        """
        return self._digest(framed(what_computes(key)) + framed(key[:_OWNER_PARTS]))

    def public_seed(self, computes: NamespaceKey) -> bytes:
        """Return the identity that the first block of public text follows; see `what_computes`."""
        return self._digest(framed(computes))

    def beyond_public(self, before: bytes, seed: bytes) -> bytes:
        """Return the identity that the first private block after public text follows."""
        return self._digest(before + seed + b"private")  # as long as no identity and tokens are

    def chain(self, before: bytes | bytearray, key: bytes | bytearray) -> bytearray:
        """Return the identities of the whole blocks in `key`, the first one after `before`. O(tokens)."""
        size = self._size
        count = len(key) // size
        if count > _MAX_CUT:
            chained, cut = bytearray(), _MAX_CUT * size
            for start in range(0, count * size, cut):
                chained += self.chain(before, key[start : start + cut])
                before = chained[-IDENTITY_BYTES:]
            return chained
        digest, ids = self._digest, []
        for block in self._cut[count](key):
            before = digest(before + block)
            ids.append(before)
        return bytearray().join(ids)

    def of_tokens(self, before: bytes, data: bytes) -> bytes:
        """Return the identity of tokens after `before`; a partial last block counts as one. O(n)."""
        whole = len(data) - len(data) % self._size
        if whole:
            before = bytes(self.chain(before, data)[-IDENTITY_BYTES:])
        return self.next(before, data[whole:]) if whole < len(data) else before

    def next(self, before: bytes | bytearray, block: bytes | bytearray) -> bytes:
        """Return the identity of one block, whole or not, after `before`."""
        return self._digest(before + block)


def framed(parts: tuple[str, ...]) -> bytes:
    """Return strings as bytes that no others have: each after its length, all after their number."""
    framed = [len(parts).to_bytes(8, "little")]
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        framed += (len(data).to_bytes(8, "little"), data)
    return b"".join(framed)
