# SPDX-License-Identifier: Apache-2.0
"""Prompts in the units of the tree: tokens with a known tokenizer, else characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from radixkv.cache.keys import EncodedTokens, TokenIds, encode_tokens
from radixkv.observe.audit.grown import GrownText, GrownTokens
from radixkv.observe.audit.known_beginnings import KnownBeginnings
from radixkv.observe.audit.record import Block, Record

#: Tokens of a character of UTF-8, where no answer of a model has told any usage.
TOKENS_PER_BYTE = 0.25
_NO_MESSAGE = -2  # no block is of it
_END_BYTES = 40
_KNOWN_BYTES = 32 << 20


class _Written(NamedTuple):
    """Text of a prompt so far, and its code points."""

    text: GrownText
    data: GrownTokens


#: Texts of the latest prompts, for the prompts that begin with them.
KnownTexts = KnownBeginnings[_Written]


def prompt_text(blocks: Sequence[Block]) -> GrownText:
    """Return blocks as a text with a piece for each, in the order of caching. O(size)."""
    return GrownText(_pieces(blocks, None))


def _known_text(blocks: Sequence[Block], known: KnownTexts) -> _Written:
    """Return the result of `prompt_text`, encoded as well. O(blocks after a known beginning)."""
    done, before = known.longest(None, blocks) or (0, _Written(GrownText(), GrownTokens()))
    pieces = _pieces(blocks[done:], blocks[done - 1] if done else None)
    more = _encoded("".join(pieces)).data
    written = _Written(before.text.grown(pieces), before.data.grown(more))
    known.keep(None, blocks, written, len(written.text) + len(written.data) + _END_BYTES * len(blocks))
    return written


def _answers(record: Record) -> list[str]:
    """Return the text that each answer adds to the prompt in a later prompt with both."""
    before = record.blocks[-1]._replace(message=_NO_MESSAGE) if record.blocks else None
    return ["".join(_pieces(answer, before)) for answer in (record.answer, *record.other_answers)]


def _pieces(blocks: Sequence[Block], before: Block | None) -> list[str]:
    """Return the text of each block; a message's first block, and blocks other than text, begin with a label.

    Args:
        before: the block before them; None: they are the first.
    """
    pieces = []
    message, is_first = (_NO_MESSAGE, True) if before is None else (before.message, False)
    for text, role, kind, number, name, _, _, image_tokens in blocks:
        if image_tokens:  # the words for it again and again, as long as a text of as many tokens
            text = text * max(1, round(image_tokens / TOKENS_PER_BYTE / len(text)))
        if number != message or kind != "text" or name:
            message = number
            shown = "" if kind in ("text", "media") else kind
            head = " ".join(word for word in (role, shown, name) if word)
            if head:
                text = f"[{head}] {text}" if is_first else f"\n[{head}] {text}"
        is_first = False
        pieces.append(text)
    return pieces


@dataclass(frozen=True, slots=True)
class PromptUnits:
    """Prompt in the units of the tree.

    Attributes:
        units: units of four bytes each.
        text: the prompt as text, for people, with a piece for each block.
        after: units of each answer that are cached once it has ended, four bytes each.
        tokens_per_unit: 1.0 if units are tokens.
        is_exact: True if units are tokens.
    """

    units: EncodedTokens
    text: GrownText
    after: tuple[EncodedTokens, ...]
    tokens_per_unit: float
    is_exact: bool

    @property
    def num_tokens(self) -> int:
        return round(len(self.units) * self.tokens_per_unit)

    def tokens_to_block(self, block: int) -> float:
        """Estimate the tokens before the end of a block."""
        share = self.text.ends[block] / len(self.text) if self.text else 0.0
        return share * len(self.units) * self.tokens_per_unit


class PromptCoding(Protocol):
    """Conversion of a log's prompts into units."""

    is_exact: bool

    def encode(self, record: Record) -> PromptUnits:
        """Return the units of a prompt.

        Raises:
            NoRequest: the served model's template can't render it.
        """

    def unit_bytes(self, unit: int) -> bytes:
        """Return the bytes that a unit adds to a text."""


class CharacterCoding:
    """Coding by characters, with the ratio to tokens that the log's usage gives."""

    is_exact = False

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}  # model -> tokens, characters
        self._known = KnownTexts(_KNOWN_BYTES)

    def encode(self, record: Record) -> PromptUnits:
        text, data = _known_text(record.blocks, self._known)
        after = tuple(map(_encoded, _answers(record)))
        units = EncodedTokens(cast(bytes, data))
        return PromptUnits(units, text, after, self._rate(record, text), is_exact=False)

    def unit_bytes(self, unit: int) -> bytes:
        """See `PromptCoding`."""
        return chr(unit).encode("utf-8", "replace")

    def _rate(self, record: Record, text: GrownText) -> float:
        """Return the tokens per character of this prompt: reported, or as in other prompts of its model."""
        reported, chars = record.usage.prompt, max(1, len(text))
        if reported:
            tokens, others = self._counts.get(record.model, (0, 0))
            self._counts[record.model] = (tokens + reported, others + chars)
            return reported / chars
        if record.model in self._counts:
            tokens, others = self._counts[record.model]
            return tokens / others
        return TOKENS_PER_BYTE * text.num_bytes / chars


class TextCoding:
    """Conversion of prompts' plain text into tokens, without a chat template.

    Args:
        encode: returns the tokens of a text.
        token_bytes: returns the bytes that a token adds to a text.
    """

    is_exact = True

    def __init__(self, encode: Callable[[str], TokenIds], token_bytes: Callable[[int], bytes]) -> None:
        self._encode, self.unit_bytes = encode, token_bytes

    def encode(self, record: Record) -> PromptUnits:
        """See `PromptCoding.encode`. The answers are encoded by themselves."""
        text = prompt_text(record.blocks)
        parts = (str(text), *_answers(record))
        units, *after = (EncodedTokens(encode_tokens(self._encode(part))) for part in parts)
        return PromptUnits(units, text, tuple(after), 1.0, is_exact=True)


def byte_coding() -> TextCoding:
    """Return a coding with a token for each byte of UTF-8."""
    return TextCoding(_bytes_of, lambda unit: bytes((unit,)))


def _bytes_of(text: str) -> EncodedTokens:
    return _encoded(text.encode("utf-8", "surrogatepass").decode("latin-1"))


def _encoded(text: str) -> EncodedTokens:
    return EncodedTokens(text.encode("utf-32-le", "surrogatepass"))
