# SPDX-License-Identifier: Apache-2.0
"""What a prompt is known by: hashes of its beginnings, and of texts that tell whose conversation it is."""

from __future__ import annotations

from typing import NamedTuple

import xxhash

from radixkv.observe.audit.record import Block, Record

#: Shorter texts of the assistant's say nothing of whose conversation it is.
_MIN_CHARS = 24
#: Of a system prompt, at each end, when nothing else is the same.
_EDGE_CHARS = 200


class PromptKeys(NamedTuple):
    """Keys that an earlier prompt is found by.

    Attributes:
        chain: a hash of the prompt up to the end of each block.
        own: what only its own conversation has: its name, the assistant's latest words, the first question.
        program: what prompts of the same program share: the ends of the system's prompt, the tools' names.
    """

    chain: list[bytes]
    own: list[bytes]
    program: list[bytes]


def keys_of(record: Record) -> PromptKeys:
    """The keys of a prompt. O(its size)."""
    own = [_key(b"conversation", record.key, record.conversation)] if record.conversation else []
    blocks = record.blocks
    own += answer_keys(tuple(block for block in blocks if block.role == "assistant"))
    first = next((block.text for block in blocks if block.role == "user"), "")
    if len(first) >= _MIN_CHARS:
        own.append(_key(b"user", record.key, first))
    system = next((block.text for block in blocks if block.role in ("system", "")), "")
    program = []
    if len(system) >= _EDGE_CHARS:
        program = [_key(b"tail", system[-_EDGE_CHARS:]), _key(b"head", system[:_EDGE_CHARS])]
    if record.tools:
        program.append(_key(b"tools", *sorted(block.name for block in blocks if block.kind == "tool")))
    return PromptKeys(_chain_of(record), own, program)


def answer_keys(answer: tuple[Block, ...]) -> list[bytes]:
    """Keys of what the assistant said last."""
    said = next((block.text for block in reversed(answer) if len(block.text) >= _MIN_CHARS), "")
    return [_key(b"assistant", said)] if said else []


def _key(kind: bytes, *texts: str) -> bytes:
    hashed = xxhash.xxh3_128(kind)
    for text in texts:
        hashed.update(text.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.digest()


def _chain_of(record: Record) -> list[bytes]:
    """A hash of the prompt up to the end of each block; what shapes the messages is in those of messages."""
    hashed = xxhash.xxh3_128(f"{record.key}\0{record.salt}\0{record.model}".encode("utf-8", "surrogatepass"))
    chain, is_told = [], False
    for text, role, kind, message, name, _ in record.blocks:
        if message >= 0 and role != "system" and not is_told:
            hashed.update(record.parameters.encode("utf-8", "surrogatepass"))
            is_told = True
        framed = f"{role}\0{kind}\0{name}\0{len(text)}\0{text}"
        hashed.update(framed.encode("utf-8", "surrogatepass"))
        chain.append(hashed.digest())
    return chain
