# SPDX-License-Identifier: Apache-2.0
"""StringMember: streaming reader of a string in a JSON object."""

from __future__ import annotations

import json
import re

# The first of two surrogates counts only with the second.
_ESCAPE = (
    r'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|'
    r"u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"
)
_CHARACTERS = re.compile(rf'(?:[^"\\\x00-\x1f]+|{_ESCAPE})*')


class StringMember:
    """Reader of the first member of a streamed object, if that is a string of this name.

    Attributes:
        is_found: its value has begun.
    """

    def __init__(self, name: str) -> None:
        self.is_found = False
        self._begin = re.compile(rf"\s*\{{\s*{re.escape(json.dumps(name))}\s*:\s*\"")
        self._held = ""
        self._is_over = False

    def push(self, text: str) -> str:
        """Return the text that a further piece adds to the value. O(len(text)), once the value has begun."""
        if self._is_over:
            return ""
        self._held += text
        if not self.is_found:
            begun = self._begin.match(self._held)
            if begun is None:
                self._is_over = len(self._held) > MAX_BEGIN
                return ""
            self.is_found = True
            self._held = self._held[begun.end() :]
        found = _CHARACTERS.match(self._held)
        assert found is not None  # nothing at all fits, too
        self._held = self._held[found.end() :]
        # Of an escape, only the beginning can be here; all else ends the string.
        self._is_over = bool(self._held) and (self._held[0] != "\\" or len(self._held) > LONGEST_ESCAPE)
        value = json.loads(f'"{found[0]}"')
        assert isinstance(value, str)
        return value


#: Characters before the value, white space and all.
MAX_BEGIN = 256
#: Of two surrogates.
LONGEST_ESCAPE = 12
