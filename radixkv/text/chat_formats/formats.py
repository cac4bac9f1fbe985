# SPDX-License-Identifier: Apache-2.0
"""The chat formats that are known, and which of them a model speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from radixkv.errors import ConfigError
from radixkv.text.chat_formats.declaration import known_families, load_format
from radixkv.text.chat_formats.format import ChatFormat

AUTO, PLAIN = "auto", "plain"
#: Format of models whose family shows no sign.
UNKNOWN = "hermes"

#: All families, the ones with the plainest signs first.
FAMILIES = known_families()
#: Name -> format.
FORMATS = MappingProxyType(
    {known.name: known for known in (*FAMILIES, ChatFormat(PLAIN, "", reasoning=None))}
)
#: The values of `--chat-format` that are no file.
FORMAT_NAMES = (AUTO, *sorted(FORMATS))


def named_format(name: str) -> ChatFormat:
    """Return the format of a value of `--chat-format` other than `auto`: a known name, or a TOML file.

    Raises:
        ConfigError: it is neither, or the file declares no format.
    """
    if name in FORMATS:
        return FORMATS[name]
    if not (str(name).endswith(".toml") or Path(name).is_file()):
        raise ConfigError(
            f"chat_format must be one of {', '.join(FORMAT_NAMES)}, or a file FAMILY.toml that declares a "
            f"format, not {name!r}"
        )
    found = load_format(name)
    if found.name in FORMAT_NAMES:
        raise ConfigError(
            f"chat_format {name}: name: {found.name!r} is a known format's name; choose another"
        )
    return found


def find_format(chat_template: str | None, is_token: Callable[[str], bool], rendered: str = "") -> ChatFormat:
    """Return a model's format, by the signs of its family.

    Args:
        chat_template: text of the model's template; None: unknown.
        is_token: tells whether a text is a single token of the model's vocabulary.
        rendered: the template's rendering of a conversation with tools and calls.
    """
    texts = f"{chat_template or ''}\0{rendered}"
    for known in FAMILIES:
        if any(all(sign in texts for sign in signs) for signs in known.signs):
            return known
    # A template that knows no calls: what its preamble will say is up to us.
    found = next((known for known in FAMILIES if any(map(is_token, known.tokens))), None)
    return found if found is not None else replace(FORMATS[UNKNOWN], is_known=False)
