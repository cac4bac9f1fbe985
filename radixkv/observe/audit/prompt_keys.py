# SPDX-License-Identifier: Apache-2.0
"""Keys of a prompt: hashes of its beginnings, and of texts that identify its conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import xxhash

from radixkv.observe.audit.grown import Grown
from radixkv.observe.audit.known_beginnings import KnownBeginnings
from radixkv.observe.audit.record import Block, Record

#: Shorter texts of the assistant's say nothing of whose conversation it is.
_MIN_CHARS = 24
#: Blocks at the end in which such a text is looked for.
_LAST_BLOCKS = 64
#: Of a system prompt, at each end, when nothing else is the same.
_EDGE_CHARS = 200
_HASHED_BYTES = 700  # of a hash that goes on
_HASH_BYTES = 60  # of a finished one


class PromptKeys(NamedTuple):
    """Keys by which an earlier prompt is found.

    Attributes:
        chain: a hash of the prompt up to the end of each block.
        own: what only its own conversation has: its name, the assistant's latest words, the first question.
        program: what prompts of the same program share: the ends of the system's prompt, the tools' names.
    """

    chain: Sequence[bytes]
    own: list[bytes]
    program: list[bytes]


class _Hashed(NamedTuple):
    """Chain of hashes so far.

    Attributes:
        chain: see `PromptKeys`.
        hashed: everything up to its end; is_told: the record's parameters are in it.
        user, system: the first text of each; None: there is none.
    """

    chain: Grown[bytes]
    hashed: xxhash.xxh3_128
    is_told: bool
    user: str | None
    system: str | None


#: Chains of the latest prompts, for the prompts that begin with them.
KnownChains = KnownBeginnings[_Hashed]


def keys_of(record: Record, known: KnownChains) -> PromptKeys:
    """Return the keys of a prompt. O(blocks after the longest known beginning)."""
    own = [_key(b"conversation", record.key, record.conversation)] if record.conversation else []
    blocks = record.blocks
    own += answer_keys(blocks)
    hashed = _hashed(record, known)
    first, system = hashed.user or "", hashed.system or ""
    if len(first) >= _MIN_CHARS:
        own.append(_key(b"user", record.key, first))
    program = []
    if len(system) >= _EDGE_CHARS:
        program = [_key(b"tail", system[-_EDGE_CHARS:]), _key(b"head", system[:_EDGE_CHARS])]
    if record.tools:
        program.append(_key(b"tools", *sorted(block.name for block in _head(blocks) if block.kind == "tool")))
    return PromptKeys(hashed.chain, own, program)


def answer_keys(blocks: Sequence[Block]) -> list[bytes]:
    """Return keys of the assistant's last long message in the last blocks of a prompt or an answer. O(1)."""
    texts = (block.text for block in reversed(blocks[-_LAST_BLOCKS:]) if block.role == "assistant")
    said = next((text for text in texts if len(text) >= _MIN_CHARS), "")
    return [_key(b"assistant", said)] if said else []


def _key(kind: bytes, *texts: str) -> bytes:
    hashed = xxhash.xxh3_128(kind)
    for text in texts:
        hashed.update(text.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.digest()


def _head(blocks: Sequence[Block]) -> Iterator[Block]:
    """Return the tools and the system's first blocks, in either order."""
    return takewhile(lambda block: block.kind == "tool" or block.role == "system", blocks)


def _hashed(record: Record, known: KnownChains) -> _Hashed:
    """Hash the prompt up to the end of each block; hashes of messages include parameters that affect them."""
    context = (record.key, record.salt, record.model, record.parameters)
    found = known.longest(context, record.blocks)
    if found is None:
        begun = "\0".join(context[:3]).encode("utf-8", "surrogatepass")
        found = 0, _Hashed(Grown([]), xxhash.xxh3_128(begun), False, None, None)
    done, (before, hashed, is_told, user, system) = found
    more, hashed = [], hashed.copy()
    for text, role, kind, message, name, *_ in record.blocks[done:]:
        if message >= 0 and role != "system" and not is_told:
            hashed.update(record.parameters.encode("utf-8", "surrogatepass"))
            is_told = True
        framed = f"{role}\0{kind}\0{name}\0{len(text)}\0{text}"
        hashed.update(framed.encode("utf-8", "surrogatepass"))
        more.append(hashed.digest())
        if user is None and role == "user":
            user = text
        if system is None and role in ("system", ""):
            system = text
    chain = before.grown(more)
    result = _Hashed(chain, hashed, is_told, user, system)
    known.keep(context, record.blocks, result, _HASHED_BYTES + _HASH_BYTES * len(chain))
    return result
