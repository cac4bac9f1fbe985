# SPDX-License-Identifier: Apache-2.0
"""The chat formats that are known, and the one that a model speaks.

A format is declared (`families.toml`, a user's file, a tokenizer's response template) or, where the chat
template writes calls as no declaration does, derived from the template's renderings:

    signs of a family in template or vocabulary  ->  response template  ->  renderings of probe turns
    find_format                                      with_response_template  derive
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from radixkv.errors import ConfigError
from radixkv.text.chat_formats.declaration import known_families, load_format
from radixkv.text.chat_formats.derive import (
    CALLS,
    RenderText,
    TemplateTraits,
    derive,
    probe_tools,
    reads_as,
    render_probe,
)
from radixkv.text.chat_formats.format import ChatFormat
from radixkv.text.chat_formats.response_template import with_response_template
from radixkv.text.chat_formats.thinking import ThinkingSwitch, find_switch

logger = logging.getLogger("radixkv")

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
        ConfigError: it is neither, or the file declares no format, or one that does not read the calls that
            it writes.
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
    for size in range(1, len(CALLS) + 1) if found.forms else ():
        text = found.write_calls(CALLS[:size], probe_tools())
        if not reads_as(found, text, size):
            raise ConfigError(
                f"chat_format {name}: forms[0]: {size} call(s) are written as {text!r}, and not read as "
                "such: `opens`, `reads`, `separators` and `closes` must fit what `begin`, `head`, `tail`, "
                "`between` and `end` write"
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


@dataclass(frozen=True, slots=True)
class KnownTemplate:
    """A chat template with the format of the answers that follow it."""

    format: ChatFormat
    traits: TemplateTraits
    thinking: ThinkingSwitch


def probe_template(
    render: RenderText,
    source: str | None,
    is_token: Callable[[str], bool],
    *,
    given: ChatFormat | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> KnownTemplate:
    """Return the format, traits and switches of a chat template. Costs about thirty small renderings.

    Args:
        source: text of the template; None: unknown.
        is_token: tells whether a text is a single token of the model's vocabulary.
        given: the format that a user has named; None: the model's own is found.
        response_template: the tokenizer's own declaration of answers, if it has one.
    """
    found = given
    if found is None:
        found = find_format(source, is_token, render_probe(render))
        try:
            found = found if response_template is None else with_response_template(found, response_template)
        except ValueError as error:
            logger.warning("The tokenizer's response_template is not used: %s", error)
    found, traits = derive(found, render, is_given=given is not None)
    asked = [{"role": "user", "content": "hello"}]
    return KnownTemplate(found, traits, find_switch(lambda variables: render(asked, None, variables), source))
