# SPDX-License-Identifier: Apache-2.0
"""Segments: keeps token ids of the texts between a prompt's control tokens; only new text is tokenised.

    <|im_start|>|system\\nYou are ...|<|im_end|>|\\n|<|im_start|>|user\\nHello|<|im_end|>| ...
       cutter          segment         cutter                      segment

A turn of a long conversation repeats all earlier segments. The ids of a known segment are looked up by a
keyed hash of its text; unknown ones are encoded, in one call. The result equals the ids of the whole text by
construction (see `radixkv.text.cutters`); a text without cutters is encoded whole.

Each owner (a tenant with a salt) finds its own segments only, so that timing reveals nothing about texts of
others. Over the budget, the owner with the most segments loses its least recently used ones. No text is kept.

The tokenizers library's `encode` and `decode` keep Python's interpreter lock from beginning to end, a second
or two for a megabyte of text, and every other thread stands still meanwhile. Its batch methods give the lock
up, compute the same without offsets, and are quicker; the list of ids remains under the lock, about 10 ms for
a million. `encode_ids` and `decode_ids` choose.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from radixkv.text.cutters import find_cutters

TokenArray: TypeAlias = npt.NDArray[np.int32]
SegmentKey = tuple[str, bool, bytes]
Owner = tuple[str, ...]
#: Encodes a text's unknown segments, and returns the ids of the whole text, int32 [n].
Encode = Callable[[], TokenArray]

#: Owner of texts to encode, tenant and salt: no other one may find, or time, their tokens. A server sets it
#: for each request.
text_owner: ContextVar[Owner] = ContextVar("text_owner", default=())

#: Bytes of token ids that are kept: the ids of fifteen million tokens.
BUDGET = 64 << 20
# Half of a chat's segments are one of these, between two messages; they tell nothing of anybody.
_BLANKS = frozenset(("\n", "\n\n", " "))
# Bytes of an entry beside its ids.
_ENTRY_BYTES = 200


class KnownSegments:
    """Token ids by owner and key, within a budget. Thread-safe; each call is O(1), or O(owners) to evict.

    Args:
        max_bytes: the budget.

    Attributes:
        num_bytes: taken by all entries.
    """

    def __init__(self, max_bytes: int = BUDGET) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._secret = secrets.token_bytes(32)
        self._owners: dict[Owner, OrderedDict[SegmentKey, TokenArray]] = {}
        self._bytes: dict[Owner, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __repr__(self) -> str:
        return f"KnownSegments({len(self)} segments, {self.num_bytes} of {self._max_bytes} bytes)"

    def key(self, text: str, vocabulary: str, is_first: bool) -> SegmentKey:
        """Return what stands for a text, unknown outside of this process. O(length)."""
        digest = hashlib.blake2b(text.encode(), digest_size=16, key=self._secret).digest()
        return vocabulary, is_first, digest

    def get(self, owner: Owner, key: SegmentKey) -> TokenArray | None:
        """Return an owner's ids of a segment, and count that as a use."""
        with self._lock:
            own = self._owners.get(owner)
            ids = None if own is None else own.get(key)
            if own is not None and ids is not None:
                own.move_to_end(key)
            return ids

    def put(self, owner: Owner, key: SegmentKey, ids: TokenArray) -> None:
        """Keep an owner's ids of a segment."""
        ids.flags.writeable = False
        with self._lock:
            own = self._owners.setdefault(owner, OrderedDict())
            if key not in own:
                own[key] = ids
                self._count(owner, ids.nbytes + _ENTRY_BYTES)
            while self.num_bytes > self._max_bytes:
                self._evict_from(max(self._bytes, key=self._bytes.__getitem__))

    def _evict_from(self, owner: Owner) -> None:
        _, ids = self._owners[owner].popitem(last=False)
        self._count(owner, -ids.nbytes - _ENTRY_BYTES)
        if not self._owners[owner]:
            del self._owners[owner], self._bytes[owner]

    def _count(self, owner: Owner, num_bytes: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes

    def check(self) -> None:
        """Assert that all entries are counted, within the budget."""
        with self._lock:
            for owner, own in self._owners.items():
                assert own, f"{owner} has no segment"
                assert self._bytes[owner] == sum(ids.nbytes + _ENTRY_BYTES for ids in own.values())
            assert self.num_bytes == sum(self._bytes.values()) <= self._max_bytes


class SegmentEncoder:
    """Encodes texts by their segments. Thread-safe.

    Args:
        backend: a `tokenizers.Tokenizer`.
        store: shared with other encoders.
        vocabulary: name of the vocabulary, which separates segments of different ones.
        renamed: ids of the backend -> ids of the model.
    """

    def __init__(
        self,
        backend: Any,
        store: KnownSegments,
        vocabulary: str = "",
        renamed: Mapping[int, int] | None = None,
    ) -> None:
        self._backend = backend
        self._store = store
        self._vocabulary = vocabulary
        self._cutters = find_cutters(backend)
        spellings = sorted(self._cutters.ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None
        self._renamed = dict(renamed or {})
        self._blanks: dict[str, TokenArray] = {}
        self._cutter_ids = {text: self._array([token]) for text, token in self._cutters.ids.items()}

    def begin(self, text: str) -> tuple[int, Encode]:
        """Cut a text and look its segments up, as the current `text_owner`. O(length).

        Returns:
            The number of unknown characters, and a function that encodes them and returns the ids of the
            whole text, int32 [n].
        """
        parts = [text] if self._pattern is None else self._pattern.split(text)
        if len(parts) == 1:
            return len(text), partial(self._encode_new, (), [None], [(0, text, None)])
        owner, first_differs = text_owner.get(), self._cutters.first_differs
        found: list[TokenArray | None] = []
        unknown: list[tuple[int, str, SegmentKey | None]] = []
        for place, part in enumerate(parts):
            if place % 2:
                found.append(self._cutter_ids[part])
            elif place and len(part) <= 2 and part in self._blanks:
                found.append(self._blanks[part])
            elif part:
                key = self._store.key(part, self._vocabulary, first_differs and not place)
                ids = self._store.get(owner, key)
                if ids is None:
                    unknown.append((len(found), part, key))
                found.append(ids)
        num_unknown = sum(len(part) for _, part, _ in unknown)
        return num_unknown, partial(self._encode_new, owner, found, unknown)

    def _encode_new(
        self, owner: Owner, found: list[TokenArray | None], unknown: list[tuple[int, str, SegmentKey | None]]
    ) -> TokenArray:
        """Encode unknown segments, keep them, and return the ids of all, int32 [n]. O(their length)."""
        # A tokenizer that treats a text's first piece in its own way sees the others behind a cutter.
        lead = next(iter(self._cutters.ids)) if self._cutters.first_differs and self._cutters.ids else ""
        texts = [text if not place else lead + text for place, text, _ in unknown]
        for (place, text, key), ids in zip(unknown, self._encode_all(texts), strict=True):
            array = self._array(ids[1:] if lead and place else ids)
            found[place] = array
            if place and text in _BLANKS:
                self._blanks[text] = array
            elif key is not None:
                self._store.put(owner, key, array)
        known = [ids for ids in found if ids is not None]
        return np.concatenate(known) if known else np.empty(0, np.int32)

    def _array(self, ids: Sequence[int]) -> TokenArray:
        array = np.array(ids, np.int32)
        for token, meant in self._renamed.items():
            array[array == token] = meant
        return array

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1 or sum(map(len, texts)) <= SHORT_TEXT:
            return [encode_ids(self._backend, text, add_special_tokens=False) for text in texts]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


# Giving the lock up may cost half a millisecond until it is held again, as long as a text of this size takes
# (characters, or ids).
SHORT_TEXT = 2048


def encode_ids(backend: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text. O(length); never under the interpreter's lock for long.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    if len(text) <= SHORT_TEXT:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def decode_ids(backend: Any, ids: list[int], *, skip_special_tokens: bool) -> str:
    """Return the text of ids. O(n); never under the interpreter's lock for long.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    if len(ids) <= SHORT_TEXT:
        return str(backend.decode(ids, skip_special_tokens=skip_special_tokens))
    (text,) = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return str(text)
