"""Pinning: pins are set and ended by their tokens and namespace; `PinBoard` keeps them."""

from __future__ import annotations

from radixkv.cache.keys import TOKEN_BYTES, NamespaceName, TokenIds, encode_tokens
from radixkv.cache.lookup import Lookup
from radixkv.cache.namespaces import Namespaces
from radixkv.cache.retention.pins import Pin, PinBoard
from radixkv.errors import InvalidRequestError


class Pinning:
    """Sets and ends the pins of one cache."""

    __slots__ = ("_board", "_lookup", "_namespaces")

    def __init__(self, board: PinBoard, lookup: Lookup, namespaces: Namespaces) -> None:
        self._board = board
        self._lookup = lookup
        self._namespaces = namespaces

    def pin(self, token_ids: TokenIds, namespace: NamespaceName, ttl: float | None, at_least: bool) -> int:
        """As `PrefixCache.pin`."""
        self._board.expire()
        data = encode_tokens(token_ids)
        if ttl is not None and not ttl > 0:
            raise InvalidRequestError(f"ttl must be above 0 seconds, not {ttl!r}", param="ttl")
        space = self._namespaces.obtain(namespace)  # what is pinned may all be public
        old = self._board.get(data, space)
        if old is not None and not at_least:
            self._board.drop(old)
        walk = self._lookup.match(data, space).walk
        if walk is None:
            return 0
        return self._board.add(data, space, walk, ttl, at_least)

    def unpin(self, token_ids: TokenIds, namespace: NamespaceName) -> bool:
        """As `PrefixCache.unpin`."""
        self._board.expire()
        data = encode_tokens(token_ids)
        space = self._namespaces.known(namespace)
        if space is None:
            return False
        pin = self._board.get(data, space)
        if pin is None:
            walk = self._lookup.match(data, space).walk
            if walk is not None and walk.depth + walk.partial == len(data) // TOKEN_BYTES:
                pin = self._board.ending_with(walk, space)
        return self._end(pin)

    def unpin_id(self, pin_id: str, namespace: NamespaceName) -> bool:
        """As `PrefixCache.unpin_id`."""
        self._board.expire()
        return self._end(self._board.of_id(pin_id, self._namespaces.key(namespace)))

    def _end(self, pin: Pin | None) -> bool:
        if pin is not None:
            self._board.drop(pin)
        return pin is not None
