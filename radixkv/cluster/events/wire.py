# SPDX-License-Identifier: Apache-2.0
"""Messages of block events, as consumers of vLLM's and SGLang's read them.

    frames    topic, sequence number (8 bytes, big-endian, from 0), MessagePack
    batch     [time, events, rank]
    event     a map whose `type` names its kind, as the classes here; unknown fields are skipped
    topic     NAME@radixkv-INCARNATION: a new incarnation knows nothing of earlier ones

An empty batch is a heartbeat. Older engines write events as arrays, the type first: these are read too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

#: Where a block is: consumers know the memory that an engine computes from by this name, whatever it is.
MEDIUM = "GPU"
#: Where the state after a block is kept: requests can go on there. Consumers skip media that they don't know.
STATE_MEDIUM = "STATE"
#: Instead of a sequence number: the end of a replay.
END = (-1).to_bytes(8, "big", signed=True)

BlockHash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Whole blocks that follow one another and can be matched from now on."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]  # empty: not told
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that can't be matched any more."""

    block_hashes: list[BlockHash]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is left. First in a batch, it makes a follower independent of all that was before."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_encode = msgspec.msgpack.Encoder().encode
# Of events that are arrays, after the type; what engines added later comes after it.
_ORDER = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


_INCARNATION = re.compile(rb"@radixkv-([0-9a-f]{16})\Z")


def topic_of(name: str, incarnation: str) -> bytes:
    """The topic of a stream's messages; an incarnation is 16 hexadecimal digits."""
    return f"{name}@radixkv-{incarnation}".encode()


def incarnation_of(topic: bytes) -> str:
    """Return the incarnation in a topic; empty: none, as in other engines' topics."""
    found = _INCARNATION.search(topic)
    return found[1].decode() if found else ""


class WireError(ValueError):
    """A message that is none."""


def encode_batch(time: float, events: Sequence[Event]) -> bytes:
    """A batch as MessagePack. O(size)."""
    return _encode((time, events, 0))


def decode_batch(payload: bytes) -> list[Event]:
    """Return the events of a batch; unknown kinds are left out. O(size).

    Raises:
        WireError: it is no batch.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event for item in events if (event := _event(item)) is not None]
    except (msgspec.DecodeError, msgspec.ValidationError, LookupError, TypeError, ValueError) as error:
        raise WireError(f"no batch of block events: {error}") from None


def _event(item: Any) -> Event | None:
    if isinstance(item, dict):
        fields, kind = item, item["type"]
    else:
        kind, *values = item
        fields = dict(zip(_ORDER.get(kind, ()), values, strict=False))
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        return msgspec.convert({"medium": None, **fields, "type": kind}, BlockRemoved)
    if kind == "BlockStored":
        optional = {"lora_id": None, "medium": None, "lora_name": None}
        return msgspec.convert({**optional, **fields, "type": kind}, BlockStored)
    return None
