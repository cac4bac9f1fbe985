# SPDX-License-Identifier: Apache-2.0
"""CallMemory: exact JSON text of answered tool calls, for APIs whose clients send objects back.

The prompt of the next turn contains the arguments again. They give the tokens in the cache only if they are
exactly the text that the model wrote, spaces included; an API that gives arguments as parsed JSON loses that
text on the way to the client and back. Like the cache, this memory is bounded, separate for each tenant, and
lost with the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from radixkv.text.json_text import read_json_text

#: Called with the id of an answered call and the text of its arguments.
Remember = Callable[[str, str], None]
#: Returns arguments of a call that a client sends back, from its id and the client's version of them.
Recall = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]

# Characters of arguments and ids kept for one tenant, and tenants: the least recently used go.
MAX_CHARS = 1024 * 1024
MAX_TENANTS = 64
# Cost of an entry besides its characters.
_ENTRY_CHARS = 200


class CallMemory:
    """Texts of arguments by tenant and the call's id. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, _Texts] = OrderedDict()
        self._lock = threading.Lock()

    def remember(self, tenant: str, call_id: str, text: str) -> None:
        """Keep the arguments of an answered call. O(1), amortised."""
        with self._lock:
            texts = self._tenants.setdefault(tenant, _Texts())
            self._tenants.move_to_end(tenant)
            texts.put(call_id, text)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)

    def recall(self, tenant: str, call_id: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the written form of arguments that a client sends back, if unchanged. O(arguments)."""
        with self._lock:
            texts = self._tenants.get(tenant)
            text = texts.get(call_id) if texts is not None else None
        if text is None:
            return value
        try:
            written = read_json_text(text)
        except (ValueError, RecursionError):  # cut off before its end
            return value
        return written if _same(written, value) else value


class _Texts:
    """Texts of a tenant, least recently used first."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, str] = OrderedDict()
        self._chars = 0

    def get(self, call_id: str) -> str | None:
        text = self._by_id.get(call_id)
        if text is not None:
            self._by_id.move_to_end(call_id)
        return text

    def put(self, call_id: str, text: str) -> None:
        self._drop(call_id)
        if len(call_id) + len(text) + _ENTRY_CHARS > MAX_CHARS:
            return
        self._by_id[call_id] = text
        self._chars += len(call_id) + len(text) + _ENTRY_CHARS
        while self._chars > MAX_CHARS:
            self._drop(next(iter(self._by_id)))

    def _drop(self, call_id: str) -> None:
        text = self._by_id.pop(call_id, None)
        if text is not None:
            self._chars -= len(call_id) + len(text) + _ENTRY_CHARS


def _same(one: Any, other: Any) -> bool:
    """Compare two JSON values; true is not 1, but 1.0 is, as in JavaScript."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_same(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, list):
        return (
            isinstance(other, list)
            and len(one) == len(other)
            and all(_same(*pair) for pair in zip(one, other, strict=True))
        )
    return bool(one == other)
