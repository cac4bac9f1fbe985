# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, one step at a time: emitted text never changes and never ends in half a character.

A tokenizer's decoder is a chain of parts. Up to the first that joins the tokens into one text (`ByteLevel`,
`Fuse`) they work on tokens, after it on the text, and each side has its own way of going step by step:

- `ByteLevelDecoder` for byte-level BPE (GPT-2's scheme: Llama 3, Qwen, SmolLM, GPT-OSS, ...). Every token
  is a run of bytes, so an incremental UTF-8 decoder over them is exact, whatever the bytes.
- `WindowDecoder` for other tokens (byte-fallback BPE, Unigram, WordPiece). It decodes the new tokens after
  one token of context and emits their text. A run of byte tokens (`<0xE2>`) is held until a token of
  another kind ends it, because the tokenizer decides on the validity of a run as a whole.
- `_Strip` and `_Replace` change the joined text on its way out, and hold back what its end may still change.
- `WholeDecoder` for chains that nothing of this fits: it says all at the end.

All but the last cost O(1) per token, and all pieces concatenate to the result of `Tokenizer.decode`.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Parts that turn the tokens into one text; what follows them works on that.
_JOINING = ("ByteLevel", "Fuse")


class DecoderChain:
    """The parts of a tokenizer's decoder, and the incremental decoder that fits them.

    Args:
        backend: a `tokenizers.Tokenizer`.

    Attributes:
        types: names of the parts in order, e.g. ["Replace", "ByteFallback", "Fuse", "Strip"].
        byte_level: tokens are spelled in GPT-2's byte alphabet.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        parts = [] if backend.decoder is None else _parts(json.loads(backend.decoder.__getstate__()))
        self.types: list[str] = [part["type"] for part in parts]
        self.byte_level = self.types[:1] == ["ByteLevel"]
        joined = next((i + 1 for i, name in enumerate(self.types) if name in _JOINING), len(parts))
        self._filters = [_text_filter(part) for part in parts[joined:] if part["type"] != "Fuse"]
        self._streams = (
            None not in self._filters
            and "ByteLevel" not in self.types[1:]
            and not any(_changes_later(part, backend) for part in parts)
        )
        self._join = " ".join if backend.decoder is None else _joiner(parts[:joined])

    def decoder(
        self, token_bytes: Callable[[int], bytes], skipped: Callable[[int], bool]
    ) -> IncrementalDecoder:
        """A decoder for one output.

        Args:
            token_bytes: bytes of one id, for a byte-level decoder.
            skipped: says of an id whether it adds nothing to the text.
        """
        if not self._streams:
            return WholeDecoder(self._backend, skipped)
        decoder: IncrementalDecoder
        if self.byte_level:
            decoder = ByteLevelDecoder(lambda token: b"" if skipped(token) else token_bytes(token))
        else:
            decoder = WindowDecoder(self._backend, self._join, skipped)
        filters = [make() for make in self._filters if make is not None]
        return FilteredDecoder(decoder, filters) if filters else decoder


def _changes_later(part: dict[str, Any], backend: Any) -> bool:
    """Return True if a token's text may become another one once a token follows.

    `BPEDecoder` drops its suffix from the last token and makes a space of it in others: at the end of a token
    that can be said later, not within.
    """
    suffix: str = part["suffix"] if part["type"] == "BPEDecoder" else ""
    return bool(suffix) and any(suffix in token[: -len(suffix)] for token in backend.get_vocab())


class IncrementalDecoder(ABC):
    """The text of one growing sequence of ids; make one per output with `Tokenizer.stream`."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the text that they complete, possibly empty. O(len(token_ids))."""

    @abstractmethod
    def finish(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD. Nothing may be pushed after."""


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
    """For tokens whose text depends on their neighbours only.

    Args:
        backend: a `tokenizers.Tokenizer`.
        join: the text of spelled tokens.
        skipped: says of an id whether it adds nothing to the text.
    """

    def __init__(
        self, backend: Any, join: Callable[[list[str]], str], skipped: Callable[[int], bool]
    ) -> None:
        self._spelling = backend.id_to_token
        self._join = join
        self._skipped = skipped
        self._context: list[str] = []  # the last token whose text is out
        self._pending: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        spellings = [self._spelling(token) for token in token_ids if not self._skipped(token)]
        self._pending += [text for text in spellings if text is not None]
        end = len(self._pending)
        while end and is_byte_token(self._pending[end - 1]):
            end -= 1
        return self._emit(end)

    def finish(self) -> str:
        return self._emit(len(self._pending))

    def _emit(self, end: int) -> str:
        if not end:
            return ""
        before = self._join(self._context)
        after = self._join(self._context + self._pending[:end])
        self._context = self._pending[end - 1 : end]
        del self._pending[:end]
        return after[len(before) :]


class WholeDecoder(IncrementalDecoder):
    """Exact for every decoder: the text comes at the end."""

    def __init__(self, backend: Any, skipped: Callable[[int], bool]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += [token for token in token_ids if not self._skipped(token)]
        return ""

    def finish(self) -> str:
        return str(self._backend.decode(self._ids, skip_special_tokens=False))


class TextFilter(Protocol):
    """Changes a text piece by piece."""

    def push(self, text: str) -> str:
        """Add to the text; what of the changed text is certain by now."""

    def finish(self) -> str:
        """Return the rest."""


class FilteredDecoder(IncrementalDecoder):
    """The text of another decoder, changed on its way out."""

    def __init__(self, decoder: IncrementalDecoder, filters: Sequence[TextFilter]) -> None:
        self._decoder = decoder
        self._filters = filters

    def push(self, token_ids: Sequence[int]) -> str:
        text = self._decoder.push(token_ids)
        for each in self._filters:
            text = each.push(text)
        return text

    def finish(self) -> str:
        text = self._decoder.finish()
        for each in self._filters:
            text = each.push(text) + each.finish()
        return text


class _Strip:
    """Takes up to `start` of a character from the text's beginning, and up to `stop` from its end."""

    def __init__(self, character: str, start: int, stop: int) -> None:
        self._character, self._start, self._stop = character, start, stop
        self._held = ""

    def push(self, text: str) -> str:
        if self._start and text:
            cut = 0
            while cut < min(self._start, len(text)) and text[cut] == self._character:
                cut += 1
            self._start = self._start - cut if cut == len(text) else 0
            text = text[cut:]
        text = self._held + text
        last = max(len(text) - self._stop, len(text.rstrip(self._character)))
        self._held = text[last:]
        return text[:last]

    def finish(self) -> str:
        return ""


class _Replace:
    """Replaces a string wherever it occurs."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, text: str) -> str:
        *done, rest = (self._held + text).split(self._pattern)
        sizes = range(min(len(self._pattern) - 1, len(rest)), 0, -1)
        held = next((size for size in sizes if self._pattern.startswith(rest[len(rest) - size :])), 0)
        self._held = rest[len(rest) - held :]
        return "".join(piece + self._content for piece in done) + rest[: len(rest) - held]

    def finish(self) -> str:
        return self._held


def _parts(state: Any) -> list[dict[str, Any]]:
    """Return the parts of a decoder's state, with sequences unfolded."""
    if state["type"] != "Sequence":
        return [state]
    return [part for inner in state["decoders"] for part in _parts(inner)]


def _text_filter(part: dict[str, Any]) -> Callable[[], TextFilter] | None:
    """Return the operation of a part on a growing text; None: it is not known."""
    if part["type"] == "Strip":
        return lambda: _Strip(part["content"], part["start"], part["stop"])
    pattern = part["pattern"].get("String") if part["type"] == "Replace" else None
    return (lambda: _Replace(pattern, part["content"])) if pattern else None


def _joiner(parts: list[dict[str, Any]]) -> Callable[[list[str]], str]:
    """Return a function that joins spelled tokens, by the parts of a decoder up to the joining one."""
    from tokenizers import decoders  # slow to import

    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": parts}).encode())
    return lambda spellings: str(decoder.decode(spellings))


def is_byte_token(token: str | None) -> bool:
    """Return whether a token is spelled as a byte, such as `<0xE2>`."""
    return token is not None and len(token) == 6 and _BYTE_TOKEN.fullmatch(token) is not None


def byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for.

    A token with a character outside the byte alphabet (only added tokens have one) stands for itself.
    """
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins, character -> byte. Printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
