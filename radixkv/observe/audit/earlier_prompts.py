# SPDX-License-Identifier: Apache-2.0
"""EarlierPrompts: the latest prompts of a log, and the search for the one that a new prompt continues."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from radixkv.observe.audit.prompt_keys import PromptKeys, answer_keys
from radixkv.observe.audit.prompt_units import PromptUnits
from radixkv.observe.audit.record import Block, Json, Record, prompt_parts
from radixkv.observe.prompt_parts import PromptParts

_OBJECT_BYTES = 400  # what a prompt takes beside its texts, and each of its blocks
_KEY_BYTES = 150


@dataclass(eq=False, slots=True)
class _Holder:
    """The latest prompt of a conversation, which its keys stand for; each turn takes the last one's place."""

    prompt: EarlierPrompt


@dataclass(eq=False)
class EarlierPrompt:
    """Observed prompt that later ones are compared with.

    Attributes:
        model, blocks, tools, place, time: see `Record`.
        conversation: conversation that it belongs to.
        number: serial number of its addition.
        chain: keys of its beginnings; known_by: the other keys by which it is found.
        available: time from which its entries can be read; None: not known.
        holder: stands for it in the index; None: it has not been added.
    """

    model: str
    blocks: Sequence[Block]
    tools: tuple[Json, ...]
    place: str
    time: float | None
    units: PromptUnits
    conversation: str
    number: int = 0
    chain: Sequence[bytes] = ()
    known_by: tuple[bytes, ...] = ()
    available: float | None = None
    num_bytes: int = field(default=0)
    holder: _Holder | None = None

    @classmethod
    def of(cls, record: Record, units: PromptUnits, conversation: str) -> Self:
        """Return the prompt of a record, which is not in the index yet."""
        return cls(record.model, record.blocks, record.tools, record.place, record.time, units, conversation)

    @cached_property
    def parts(self) -> PromptParts:
        """See `prompt_parts`. O(its blocks), once."""
        return prompt_parts(self.blocks, self.tools, self.model)


class EarlierPrompts:
    """Bounded index of the latest prompts, searched by common beginnings and keys.

    Args:
        max_bytes: approximate limit of their texts' bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._latest: OrderedDict[int, EarlierPrompt] = OrderedDict()
        self._by_key: dict[bytes, _Holder] = {}
        self._conversations = 0
        self._added = 0

    def __len__(self) -> int:
        return len(self._latest)

    def find(self, record: Record, keys: PromptKeys) -> tuple[EarlierPrompt | None, str]:
        """Return the earlier prompt that this one should continue, and its conversation.

        The search goes by texts unique to its conversation, by a common beginning, and by its program.
        """
        chain = keys.chain
        found = self._first(keys.own)
        if found is None:
            for at in range(len(chain) - 1, -1, -1):
                found = self._first((chain[at],))
                if found is not None:
                    block = record.blocks[at]
                    if block.message >= 0 and block.role not in ("system", ""):
                        return found, record.conversation or found.conversation
                    break
        else:
            return found, record.conversation or found.conversation
        if found is None:
            found = self._first(keys.program)
        if record.conversation:
            return found, record.conversation
        self._conversations += 1
        return found, f"#{self._conversations}"

    def _first(self, keys: Iterable[bytes]) -> EarlierPrompt | None:
        return next((known.prompt for key in keys if (known := self._by_key.get(key))), None)

    def add(
        self,
        prompt: EarlierPrompt,
        keys: PromptKeys,
        answers: tuple[tuple[Block, ...], ...],
        continued: EarlierPrompt | None = None,
    ) -> None:
        """Add a prompt, and drop the oldest ones over the bound. O(its blocks without those continued).

        Args:
            continued: the earlier prompt that it continues, dropped here.
        """
        self._added += 1
        prompt.number, prompt.chain = self._added, keys.chain
        prompt.known_by = (*keys.own, *_answers_keys(answers), *keys.program)
        text, units = len(prompt.units.text), len(prompt.units.units.data)
        blocks = len(prompt.blocks) * (_OBJECT_BYTES + _KEY_BYTES)
        # The strings of its blocks, the text made of them, and the units.
        prompt.num_bytes = 2 * text + units + blocks + 4 * _OBJECT_BYTES
        known = self._take_place(prompt, continued)
        prompt.holder = prompt.holder or _Holder(prompt)
        self._by_key.update(dict.fromkeys(keys.chain[known:], prompt.holder))
        self._by_key.update(dict.fromkeys(prompt.known_by, prompt.holder))
        self._latest[id(prompt)] = prompt
        self._bytes += prompt.num_bytes
        while self._bytes > self._max_bytes and len(self._latest) > 1:
            self.drop(next(iter(self._latest.values())))
        if continued is not None:
            self.drop(continued, prompt)

    def _take_place(self, prompt: EarlierPrompt, continued: EarlierPrompt | None) -> int:
        """Let the holder of a continued prompt stand for the new one; return the keys that it is known by."""
        if continued is None or id(continued) not in self._latest:
            return 0
        known, holder = len(continued.chain), continued.holder
        if not known or known > len(prompt.chain) or continued.chain[-1] != prompt.chain[known - 1]:
            return 0  # it changed the ending
        assert holder is not None
        self._forget(continued, continued.known_by)
        del self._latest[id(continued)]
        self._bytes -= continued.num_bytes
        holder.prompt, prompt.holder, continued.holder = prompt, holder, None
        while known and self._by_key.get(prompt.chain[known - 1]) is not holder:
            known -= 1  # another conversation took it meanwhile
        return known

    def _forget(self, prompt: EarlierPrompt, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._by_key.get(key) is prompt.holder:
                del self._by_key[key]

    def answered(self, prompt: EarlierPrompt, answers: tuple[tuple[Block, ...], ...]) -> None:
        """Note the answers to a prompt in the index."""
        if id(prompt) in self._latest and prompt.holder is not None:
            for key in _answers_keys(answers):
                self._by_key[key] = prompt.holder
                prompt.known_by = (*prompt.known_by, key)

    def drop(self, prompt: EarlierPrompt, successor: EarlierPrompt | None = None) -> None:
        """Remove a prompt. O(its blocks), without the blocks that its successor begins with.

        Args:
            successor: a later prompt of its conversation.
        """
        if self._latest.pop(id(prompt), None) is None:
            return
        self._bytes -= prompt.num_bytes
        chain = prompt.chain
        if (
            successor is not None and successor.number > prompt.number
        ):  # beginnings of both are found as the successor's by now
            chain = chain[_num_shared(chain, successor.chain) :]
        self._forget(prompt, (*chain, *prompt.known_by))
        prompt.holder = None  # no cycle of references keeps its texts


def _num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Count the common leading keys of two chains; a key stands for everything before it. O(log n)."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


def _answers_keys(answers: tuple[tuple[Block, ...], ...]) -> list[bytes]:
    return [key for answer in answers for key in answer_keys(answer)]
