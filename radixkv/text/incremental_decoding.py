"""Token ids to text, one step at a time: what is emitted never changes and never ends in half a character.

Two decoders behind one interface:

- `ByteLevelDecoder` for byte-level BPE (GPT-2's scheme: Llama 3, Qwen, SmolLM, GPT-OSS, ...). Every token
  is a run of bytes, so an incremental UTF-8 decoder over them is exact, whatever the bytes.
- `WindowDecoder` for all others (byte-fallback BPE, Unigram, WordPiece). It decodes the new tokens behind one
  token of context and emits what they add. A run of byte tokens (`<0xE2>`) is held until a token of another
  kind ends it, because the tokenizer decides on the validity of a run as a whole.

Both cost O(1) per token, and their pieces concatenate to what `Tokenizer.decode` gives for all ids at once.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
#: A UTF-8 character has four bytes, so at most three tokens can be waiting for its end.
_MOST_PENDING = 4


class IncrementalDecoder(ABC):
    """The text of one growing sequence of ids; make one per output with `Tokenizer.stream`."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that they complete, possibly empty. O(len(token_ids))."""

    @abstractmethod
    def finish(self) -> str:
        """The text still held back; an incomplete character becomes U+FFFD. Nothing may be pushed after."""


class ByteLevelDecoder(IncrementalDecoder):
    """Exact for tokenizers whose decoder is `ByteLevel`.

    Args:
        token_bytes: bytes of one id; empty for ids that add nothing to the text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # Replaces maximal invalid subparts, as Rust's from_utf8_lossy does.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes = self._token_bytes
        return self._utf8.decode(b"".join([token_bytes(token) for token in token_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder(IncrementalDecoder):
    """For any other decoder of the tokenizers library whose tokens depend on their neighbours only.

    Args:
        backend: a `tokenizers.Tokenizer`.
        skipped: says of an id whether it adds nothing to the text.
        joins_bytes: the decoder joins bytes of several tokens other than `<0x..>` into characters.
    """

    def __init__(self, backend: Any, skipped: Callable[[int], bool], *, joins_bytes: bool = False) -> None:
        self._backend = backend
        self._skipped = skipped
        self._joins_bytes = joins_bytes
        self._context: list[int] = []  # the last token whose text is out
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._pending += [token for token in token_ids if self._adds_text(token)]
        end = len(self._pending)
        while end and self._is_byte(self._pending[end - 1]):
            end -= 1
        return self._emit(end)

    def finish(self) -> str:
        self._joins_bytes = False
        return self._emit(len(self._pending))

    def _emit(self, end: int) -> str:
        if not end:
            return ""
        before = self._backend.decode(self._context, skip_special_tokens=False)
        after = self._backend.decode(self._context + self._pending[:end], skip_special_tokens=False)
        if self._joins_bytes and after.endswith(_REPLACEMENT) and end < _MOST_PENDING:
            return ""
        self._context = self._pending[end - 1 : end]
        del self._pending[:end]
        return str(after[len(before) :])

    def _adds_text(self, token: int) -> bool:
        return not self._skipped(token) and self._backend.id_to_token(token) is not None

    def _is_byte(self, token: int) -> bool:
        return is_byte_token(self._backend.id_to_token(token))


def is_byte_token(token: str | None) -> bool:
    """Is this the spelling of a byte-fallback token, such as `<0xE2>`?"""
    return token is not None and len(token) == 6 and _BYTE_TOKEN.fullmatch(token) is not None


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for.

    A token with a character outside the byte alphabet (only added tokens have one) stands for itself.
    """
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte. Printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
