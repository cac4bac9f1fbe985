# SPDX-License-Identifier: Apache-2.0
"""GrammarPlaces: the field of the body that an error in an answer's grammar concerns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from radixkv.errors import InvalidRequestError

#: How a compiler says where in a grammar it has found something; the text of the grammar follows it.
_PLACE = re.compile(r"\b(?P<line>\d+)(?P<column>\(\d+\))(?=: )")
#: The same of a schema in a grammar that the server has made.
_WITHIN = re.compile(
    r"the Lark grammar can't be used: \d+\(\d+\): failed to compile JSON schema: |"
    + r"(?:\n +(?:\d+ \|.*|\^))+\s*\Z"
)
_OF_SCHEMA = "JSON schema"
_TEXT = re.compile(r"(?:\n +(?:\d+ \|.*|\^))+\s*\Z")


@dataclass(frozen=True, slots=True)
class GrammarPlaces:
    """Origin of a grammar's parts in a body.

    Args:
        param: field of the grammar as a whole.
        parts: field -> lines of the grammar, counted from 1, with that field's text.
        tools: line -> name of the tool whose arguments it describes.
    """

    param: str
    parts: Mapping[str, range] = field(default_factory=dict)
    tools: Mapping[int, str] = field(default_factory=dict)

    def name(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error in the grammar with the field's name and the line in its text."""
        message, param = str(error), self.param
        place = _PLACE.search(message)
        if place is None and len(self.parts) == 1 and _OF_SCHEMA not in message:
            (param,) = self.parts
        elif place is not None:
            line = int(place["line"])
            if line in self.tools:
                param = "tools"
                message = f"the arguments of {self.tools[line]!r:.80}: {_WITHIN.sub('', message)}"
            for part, lines in self.parts.items():
                if line in lines:
                    param = part
                    within = f"line {line - lines.start + 1}{place['column']}"
                    message = message[: place.start()] + within + message[place.end() :]
                    message = _TEXT.sub("", message)
        return InvalidRequestError(f"{param}: {message}", param=param, code=error.code)
