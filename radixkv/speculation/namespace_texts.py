# SPDX-License-Identifier: Apache-2.0
"""NamespaceTexts: the recent outputs of each namespace, for guesses in the same namespace only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from radixkv.cache.keys import NamespaceKey, NamespaceName, frame_namespace
from radixkv.speculation.text_index import TextIndex

#: Most tokens of a namespace's text; beyond, the older half is forgotten.
MAX_TOKENS = 32_768
#: Namespaces with a text; the one with the oldest output is dropped first.
MAX_NAMESPACES = 64
#: Shorter outputs are not kept.
MIN_OUTPUT = 8
_END = -1  # stands between two outputs; it is no token, so no match or guess crosses it


class NamespaceTexts:
    """Recent outputs by namespace: at most `MAX_NAMESPACES` texts of about 0.5 MB at most."""

    def __init__(self) -> None:
        self._texts: OrderedDict[NamespaceKey, TextIndex] = OrderedDict()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, namespace: NamespaceName, output: Sequence[int]) -> None:
        """Add a finished output of a namespace. O(output)."""
        if len(output) < MIN_OUTPUT:
            return
        key = frame_namespace(namespace)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = TextIndex(np.empty(0, dtype=np.int32))
            if len(self._texts) > MAX_NAMESPACES:
                self._texts.popitem(last=False)
        elif len(text) > MAX_TOKENS:
            kept = text.read(len(text) - MAX_TOKENS // 2, MAX_TOKENS)
            text = self._texts[key] = TextIndex(np.asarray(kept, dtype=np.int32))
        self._texts.move_to_end(key)
        for token_id in output[-MAX_TOKENS // 2 :]:
            text.append(token_id)
        text.append(_END)

    def find(self, namespace: NamespaceName, context: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens after the latest match of the end of `context`, and its length."""
        text = self._texts.get(frame_namespace(namespace)) if self._texts else None
        if text is None:
            return [], 0
        position, length = text.find(context)
        found = text.read(position, most) if length else []
        if _END in found:
            del found[found.index(_END) :]
        return found, length

    def forget(self) -> None:
        """Forget everything."""
        self._texts.clear()
