# SPDX-License-Identifier: Apache-2.0
"""Block keys: what blocks are called on the wire, 64 bits that follow from their text and from whose it is.

    chain of a block      hash of the chain before it and its token ids; the same for everybody
    key of a block        hash of its chain, keyed by its owner's key
    key of an owner       hash of the namespace without the model, keyed by the secret of the stream

So that who reads events can't tell whose text is cached by trying texts; who knows the secret, a router, can
name the blocks of any prompt before it is sent. Keys choose a replica; nothing else is done on their word.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from radixkv.cache.block_identity import IDENTITY_BYTES, BlockIdentities, framed
from radixkv.cache.keys import TOKEN_BYTES, NamespaceKey

KEY_BYTES = 8
#: The chain before the first block.
NO_CHAIN = bytes(IDENTITY_BYTES)
#: The owner of text that all share; no namespace has this key.
PUBLIC: NamespaceKey = ()
_MODEL_PART = 3  # of a namespace: one replica serves one model
_LABEL_BYTES = 12
_STATE = int.from_bytes(blake2b(b"state", digest_size=KEY_BYTES).digest(), "big")


class BlockKeys:
    """Names blocks for one stream, or for all streams that a router reads.

    Args:
        secret: 16 bytes or more.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = blake2b(secret, digest_size=32, person=b"radixkv events").digest()
        self.owner = lru_cache(4096)(self._owner)
        self.label = lru_cache(4096)(self._label)

    def _owner(self, namespace: NamespaceKey) -> bytes:
        return blake2b(_parts(namespace), key=self._secret, digest_size=32).digest()

    def _label(self, namespace: NamespaceKey) -> str | None:
        if is_open(namespace):
            return None
        if namespace == PUBLIC:
            return PUBLIC_LABEL
        return blake2b(self.owner(namespace), digest_size=_LABEL_BYTES, person=b"label").hexdigest()


#: Name on the wire of the owner of public text.
PUBLIC_LABEL = "public"


def is_open(namespace: NamespaceKey) -> bool:
    """Return True for the default namespace: no tenant and no salt."""
    return namespace != PUBLIC and not any(namespace[:2])


def _parts(namespace: NamespaceKey) -> bytes:
    if namespace == PUBLIC:
        return framed(PUBLIC)
    whole = (*namespace, *[""] * (_MODEL_PART - len(namespace)))
    return framed(whole[:_MODEL_PART] + whole[_MODEL_PART + 1 :])


def state_name(key: int) -> int:
    """Name on the wire of the state after a block: unlike all blocks, for readers that ignore the medium."""
    return key ^ _STATE


def block_key(owner: bytes, chain: bytes) -> int:
    """The key of the block that ends a chain."""
    return int.from_bytes(blake2b(chain, key=owner, digest_size=KEY_BYTES).digest(), "big")


@lru_cache(64)
def chains(block_size: int) -> BlockIdentities:
    """Return the function that chains blocks of a size: `chain(before, token bytes)`."""
    return BlockIdentities(block_size * TOKEN_BYTES)
