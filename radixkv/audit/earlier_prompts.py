"""EarlierPrompts: the latest prompts of a log, and which of them a new one should go on after."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import xxhash

from radixkv.audit.prompt_units import PromptUnits
from radixkv.audit.record import Block, Record

#: Shorter texts of the assistant's say nothing of whose conversation it is.
_MIN_CHARS = 24
#: Of a system prompt, at each end, when nothing else is the same.
_EDGE_CHARS = 200
_OBJECT_BYTES = 400  # what a prompt takes beside its texts, and each of its blocks
_KEY_BYTES = 150


@dataclass(slots=True, eq=False)
class EarlierPrompt:
    """A prompt that has been observed.

    Attributes:
        conversation: whose it is.
        known_by: keys that it is found by.
        available: when what it wrote could be read; None: not known.
    """

    record: Record
    units: PromptUnits
    conversation: str
    known_by: tuple[bytes, ...]
    available: float | None
    num_bytes: int = field(default=0)


class EarlierPrompts:
    """Keeps the latest prompts within a bound, and finds by what they have in common.

    Args:
        max_bytes: of their texts, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._latest: OrderedDict[int, EarlierPrompt] = OrderedDict()
        self._by_key: dict[bytes, EarlierPrompt] = {}
        self._conversations = 0

    def __len__(self) -> int:
        return len(self._latest)

    def find(self, record: Record, chain: list[bytes]) -> tuple[EarlierPrompt | None, str]:
        """The earlier prompt that this one should go on after, and the conversation that it belongs to.

        By the name of the conversation; by the assistant's latest words in it; by the beginning that both
        share; by the first thing that was asked; and by the ends of the system's prompt.

        Args:
            chain: a hash of the prompt up to the end of each block.
        """
        same, family = self._keys(record)
        found = next((known for key in same if (known := self._by_key.get(key))), None)
        if found is None:
            for at in range(len(chain) - 1, -1, -1):
                found = self._by_key.get(chain[at])
                if found is not None:
                    block = record.blocks[at]
                    if block.message >= 0 and block.role not in ("system", ""):
                        return found, record.conversation or found.conversation
                    break
        else:
            return found, record.conversation or found.conversation
        if found is None:
            found = next((known for key in family if (known := self._by_key.get(key))), None)
        if record.conversation:
            return found, record.conversation
        self._conversations += 1
        return found, f"#{self._conversations}"

    def _keys(self, record: Record) -> tuple[list[bytes], list[bytes]]:
        """Keys of a prompt: those that only its own conversation has, and those of its family."""
        same = [_key(b"conversation", record.key, record.conversation)] if record.conversation else []
        assistant = next(
            (
                block.text
                for block in reversed(record.blocks)
                if block.role == "assistant" and len(block.text) >= _MIN_CHARS
            ),
            "",
        )
        if assistant:
            same.append(_key(b"assistant", assistant))
        first = next((block.text for block in record.blocks if block.role == "user"), "")
        if len(first) >= _MIN_CHARS:
            same.append(_key(b"user", record.key, first))
        system = next((block.text for block in record.blocks if block.role in ("system", "")), "")
        family = []
        if len(system) >= _EDGE_CHARS:
            family = [_key(b"tail", system[-_EDGE_CHARS:]), _key(b"head", system[:_EDGE_CHARS])]
        if record.tools:
            names = [block.name for block in record.blocks if block.kind == "tool"]
            family.append(_key(b"tools", *sorted(names)))
        return same, family

    def add(self, prompt: EarlierPrompt, chain: list[bytes], answer: tuple[Block, ...]) -> None:
        """Keep a prompt; what it goes on after needs to be kept no longer, the oldest ones go."""
        same, family = self._keys(prompt.record)
        prompt.known_by = (*chain, *same, *_said(answer), *family)
        text, units = len(prompt.units.text), len(prompt.units.units.data)
        blocks = len(prompt.record.blocks) * (_OBJECT_BYTES + _KEY_BYTES)
        # The body, the text made of it, and the units.
        prompt.num_bytes = 2 * text + units + blocks + 4 * _OBJECT_BYTES
        for key in prompt.known_by:
            self._by_key[key] = prompt
        self._latest[id(prompt)] = prompt
        self._bytes += prompt.num_bytes
        while self._bytes > self._max_bytes and len(self._latest) > 1:
            self.drop(next(iter(self._latest.values())))

    def answered(self, prompt: EarlierPrompt, answer: tuple[Block, ...]) -> None:
        """The answer to a prompt that is kept is known by now."""
        if id(prompt) in self._latest:
            for key in _said(answer):
                self._by_key[key] = prompt
                prompt.known_by = (*prompt.known_by, key)

    def drop(self, prompt: EarlierPrompt) -> None:
        """Keep a prompt no longer."""
        if self._latest.pop(id(prompt), None) is None:
            return
        self._bytes -= prompt.num_bytes
        for key in prompt.known_by:
            if self._by_key.get(key) is prompt:
                del self._by_key[key]


def _said(answer: tuple[Block, ...]) -> list[bytes]:
    """Keys of what the assistant said."""
    said = next((b.text for b in reversed(answer) if len(b.text) >= _MIN_CHARS), "")
    return [_key(b"assistant", said)] if said else []


def _key(kind: bytes, *texts: str) -> bytes:
    hashed = xxhash.xxh3_128(kind)
    for text in texts:
        hashed.update(text.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.digest()


def chain_of(record: Record) -> list[bytes]:
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
