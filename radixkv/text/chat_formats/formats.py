# SPDX-License-Identifier: Apache-2.0
"""The chat formats that are known, and which of them a model speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.json_families import HERMES, JSON_FAMILIES
from radixkv.text.chat_formats.tagged_families import TAGGED_FAMILIES
from radixkv.text.chat_formats.text_families import GEMMA, TEXT_FAMILIES

AUTO, PLAIN = "auto", "plain"

#: All families, the ones with the plainest signs first.
FAMILIES = (*TAGGED_FAMILIES, *TEXT_FAMILIES, *JSON_FAMILIES, GEMMA)
#: Name -> format.
FORMATS = MappingProxyType(
    {known.name: known for known in (*FAMILIES, ChatFormat(PLAIN, "", reasoning=None))}
)
#: The values of `--chat-format`.
FORMAT_NAMES = (AUTO, *sorted(FORMATS))


def find_format(
    name: str, chat_template: str | None, is_token: Callable[[str], bool], rendered: str = ""
) -> ChatFormat:
    """Return the format of that name; `auto`: the model's format, by the signs of its family.

    Args:
        name: one of `FORMAT_NAMES`.
        chat_template: text of the model's template; None: unknown.
        is_token: tells whether a text is a single token of the model's vocabulary.
        rendered: the template's rendering of a conversation with tools and calls.
    """
    if name != AUTO:
        return FORMATS[name]
    texts = f"{chat_template or ''}\0{rendered}"
    for known in FAMILIES:
        if any(all(sign in texts for sign in signs) for signs in known.signs):
            return known
    # A template that knows no calls: what its preamble will say is up to us.
    found = next((known for known in FAMILIES if any(map(is_token, known.tokens))), None)
    return found if found is not None else replace(HERMES, is_known=False)
