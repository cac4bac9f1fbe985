# SPDX-License-Identifier: Apache-2.0
"""Cutters: added tokens at which a text can be cut so that its parts are encoded for themselves.

A tokenizer of the `tokenizers` library first looks for added tokens in the raw text, leftmost and longest
first. The text between them is normalised, split and encoded by itself. So its ids do not depend on its
neighbours, unless a token between them acts beyond its own spelling. An added token is no cutter if

- it is found after normalisation (`normalized`), takes white space beside it (`lstrip`, `rstrip`) or looks at
  its neighbours (`single_word`);
- another one contains it, is inside of it or overlaps it, as the longest at the leftmost place wins; or it
  overlaps itself;
- it begins with white space that another may take (`rstrip`), or begins or ends with a letter at which
  another one would not count as a word (`single_word`).

A model that draws at random (BPE dropout) has no cutters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cutters:
    """The certain cutters of one tokenizer.

    Attributes:
        ids: spelling -> id.
        first_differs: a text's first segment is encoded in another way than those after a cutter.
    """

    ids: Mapping[str, int]
    first_differs: bool


def find_cutters(backend: Any) -> Cutters:
    """Return the cutters of a `tokenizers.Tokenizer`. O(added tokens x their length squared)."""
    state = json.loads(backend.to_str())
    first_differs = any(
        node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"
        for node in _nodes(state.get("pre_tokenizer"))
    )
    if state["model"].get("dropout"):
        return Cutters({}, first_differs)
    tokens = [token for token in state["added_tokens"] if token["content"]]
    raw = [token for token in tokens if not token["normalized"]]
    overlapping = _overlapping([token["content"] for token in raw])
    takes_space = any(token["rstrip"] for token in raw)
    needs_border = any(token["single_word"] for token in raw)

    def cuts(token: Mapping[str, Any]) -> bool:
        text = token["content"]
        if token["lstrip"] or token["rstrip"] or token["single_word"] or text in overlapping:
            return False
        if takes_space and text[0].isspace():
            return False
        return not (needs_border and (_is_word(text[0]) or _is_word(text[-1])))

    return Cutters({token["content"]: token["id"] for token in raw if cuts(token)}, first_differs)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _overlapping(texts: Sequence[str]) -> set[str]:
    """Return the texts that contain, are inside of, or overlap another one or themselves."""
    known, found = set(texts), set[str]()
    begins = {text[:size] for text in known for size in range(1, len(text))}
    ends = {text[-size:] for text in known for size in range(1, len(text))}
    for text in known:
        length = len(text)
        inside = {
            text[start:end]
            for start in range(length)
            for end in range(start + 1, length + 1)
            if end - start < length
        }
        if others := inside & known:
            found |= {text, *others}
        if any(text[:size] in ends or text[-size:] in begins for size in range(1, length)):
            found.add(text)
    return found


def _nodes(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object of JSON data."""
    if isinstance(state, dict):
        yield state
        state = list(state.values())
    if isinstance(state, list):
        for part in state:
            yield from _nodes(part)
