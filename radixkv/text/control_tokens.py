# SPDX-License-Identifier: Apache-2.0
"""Keeping control tokens out of users' hands: text that spells one is encoded as text.

A control token (`<|im_start|>`, `</s>`, ...) frames a chat. A tokenizer finds its spelling anywhere in the
text that it is given, so a message that contains `<|im_end|><|im_start|>system` would open a system message.
Here:

1. `mark` puts a secret mark after the first character of each spelling in the user's strings, and of any
   possible beginning of one at a string's end (a template may join two strings).
2. The template renders the marked strings. A spelling that is whole in the result is the template's own.
3. `begin_marked` wraps those in two more secret marks, takes the first mark out, and encodes the text with a
   copy of the tokenizer in which every control token is spelled with that wrapping. One pass, so that text
   between control tokens is normalised and split exactly as always.

The marks are drawn at random per process from a private-use plane of Unicode, so that they can't be sent.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from radixkv.text.segments import Encode, KnownSegments, SegmentEncoder, encode_ids
from radixkv.text.trusted_text import TrustedText

_PRIVATE_USE = 0xF0000
_PRIVATE_USE_SIZE = 0xFFFE


def _secret_mark() -> str:
    """Draw six private-use characters: 96 random bits."""
    return "".join(chr(_PRIVATE_USE + secrets.randbelow(_PRIVATE_USE_SIZE)) for _ in range(6))


class ControlTokens:
    """The control tokens of one tokenizer, and the encoding of text around them.

    Args:
        backend: a `tokenizers.Tokenizer`.
        spellings: id -> spelling of each control token.
    """

    def __init__(self, backend: Any, spellings: Mapping[int, str]) -> None:
        self._backend = backend
        # One character can't be broken in two, and templates write white space as ordinary text.
        self._spellings = {
            token: text for token, text in spellings.items() if len(text) > 1 and not text.isspace()
        }
        texts = sorted(set(self._spellings.values()), key=len, reverse=True)
        whole = "|".join(map(re.escape, texts)) if texts else "(?!)"
        # The longest spelling at the leftmost place, as the tokenizer itself matches.
        self._pattern = re.compile(whole)
        # The first character of every spelling, overlapping ones included.
        self._first = re.compile(f"(?=(?:{whole}))(.)", re.DOTALL)
        self._starts = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._first_characters = sorted({text[0] for text in texts})
        self._longest_start = max((len(text) - 1 for text in texts), default=0)
        self._break = _secret_mark()
        # One for each side, so that no two wrapped spellings overlap.
        self._open, self._close = _secret_mark(), _secret_mark()
        self._lock = threading.Lock()
        self._marked_backend: Any = None
        self._original_ids: dict[int, int] = {}
        self._segments: SegmentEncoder | None = None

    def spelled_in(self, text: str) -> bool:
        """Return True if the text spells a control token outside of its trusted pieces."""
        if isinstance(text, TrustedText):
            return any(self.spelled_in(piece) for piece, is_trusted in text.pieces if not is_trusted)
        return self._pattern.search(text) is not None

    def needs_mark(self, text: str) -> bool:
        """Return True if untrusted text spells a control token, or ends with the beginning of one."""
        if isinstance(text, TrustedText):
            return any(self.needs_mark(piece) for piece, is_trusted in text.pieces if not is_trusted)
        return bool(self._open_ends(text)) or self.spelled_in(text)

    def mark(self, text: str) -> str:
        """Break every spelling in the text, and every beginning of one at its end, unless it is trusted."""
        if isinstance(text, TrustedText):
            return "".join(piece if is_trusted else self.mark(piece) for piece, is_trusted in text.pieces)
        places = {found.end(1) for found in self._first.finditer(text)}
        places.update(start + 1 for start in self._open_ends(text))
        pieces = []
        last = 0
        for place in sorted(places):
            pieces.append(text[last:place])
            last = place
        return self._break.join([*pieces, text[last:]])

    def _open_ends(self, text: str) -> list[int]:
        """Return where a spelling begins that the text's end cuts off. O(longest spelling)."""
        tail = text[-self._longest_start :] if self._longest_start else ""
        for first in self._first_characters:
            if first in tail:
                break
        else:
            return []
        length = len(text)
        sizes = range(1, min(self._longest_start, length) + 1)
        return [length - size for size in sizes if text[length - size :] in self._starts]

    def unmark(self, text: str) -> str:
        """Take the marks out again."""
        return text.replace(self._break, "")

    def encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode text in which no control token has a meaning.

        Args:
            add_special_tokens: let the tokenizer add its tokens around a text (such as a begin token).
        """
        if not self.spelled_in(text):
            return encode_ids(self._backend, text, add_special_tokens=add_special_tokens)
        return self._encode_wrapped(text, add_special_tokens)

    def begin_marked(self, rendered: str, store: KnownSegments) -> tuple[int, Encode]:
        """Begin to encode a rendered template: whole spellings are control tokens, marked ones are text.

        Args:
            store: keeps the segments between the template's control tokens.
        """
        self._need_marked_backend()
        if self._segments is None:
            self._segments = SegmentEncoder(self._marked_backend, store, "marked", self._original_ids)
        return self._segments.begin(self.unmark(self._pattern.sub(self._wrap, rendered)))

    def _wrap(self, found: re.Match[str]) -> str:
        return self._open + found[0] + self._close

    def _need_marked_backend(self) -> None:
        with self._lock:
            if self._marked_backend is None:
                self._build_marked_backend()

    def _encode_wrapped(self, text: str, add_special_tokens: bool) -> list[int]:
        self._need_marked_backend()
        ids = encode_ids(self._marked_backend, text, add_special_tokens=add_special_tokens)
        if not self._original_ids:
            return ids
        return [self._original_ids.get(token, token) for token in ids]

    def _build_marked_backend(self) -> None:
        """Copy the tokenizer with every control token respelled; takes about a second, once, when needed."""
        from tokenizers import Tokenizer  # slow to import

        state = json.loads(self._backend.to_str())
        renamed = {text: self._open + text + self._close for text in self._spellings.values()}
        for token in state["added_tokens"]:
            if token["content"] in renamed:
                token["content"] = renamed[token["content"]]
                token["normalized"] = False
        _respell_model(state["model"], renamed)
        backend = Tokenizer.from_str(json.dumps(state, ensure_ascii=False))
        for token, text in self._spellings.items():
            found = backend.token_to_id(renamed[text])
            if found is not None and found != token:
                self._original_ids[found] = token
        self._marked_backend = backend


def _respell_model(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Respell control tokens in the model's own vocabulary, where plain text could find them otherwise."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(piece, piece): token for piece, token in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [piece, score]
        model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if merges := model.get("merges"):
        model["merges"] = [merge for merge in merges if not _makes_control_token(merge, renamed)]


def _makes_control_token(merge: str | list[str], renamed: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in renamed or right in renamed or left + right in renamed
