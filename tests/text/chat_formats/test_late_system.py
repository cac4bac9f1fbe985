# SPDX-License-Identifier: Apache-2.0
"""Messages of the system after others, with templates that show them, drop them or refuse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import jinja2
import pytest

from radixkv.errors import InvalidRequestError
from radixkv.text.chat_formats.derive import derive
from radixkv.text.chat_formats.formats import FORMATS
from radixkv.text.chat_formats.template_input import template_messages

SHOWS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DROPS = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# As Gemma's and Mistral's do.
TAKES_TURNS = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ refuse('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ first if loop.first }}{{ m.content }}{% endfor %}"
)
U = {"role": "user", "content": "question"}
A = {"role": "assistant", "content": "answer"}
S = {"role": "system", "content": "rule"}


def rendered(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """What the template makes of messages, prepared for it."""

    def refuse(message: str) -> None:
        raise InvalidRequestError(message)

    compiled = jinja2.Environment().from_string(template, globals={"refuse": refuse})

    def render(messages: Sequence[Mapping[str, Any]], tools: object, options: Mapping[str, Any]) -> str:
        return compiled.render(messages=messages)

    chat_format = FORMATS["plain"]
    _, traits = derive(chat_format, render)
    return render(template_messages([dict(m) for m in messages], (), chat_format, traits), None, {})


def test_a_template_that_shows_them_gets_them() -> None:
    assert rendered(SHOWS, [S, U, S, A, U, S]) == (
        "<system>rule<user>question<system>rule<assistant>answer<user>question<system>rule"
    )


@pytest.mark.parametrize("template", [DROPS, TAKES_TURNS])
@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([U, S], ["question\n\nrule"]),
        ([U, S, A, U], ["question\n\nrule", "answer", "question"]),
        ([U, A, S, U], ["question", "answer", "rule\n\nquestion"]),
        ([U, A, U, S, S], ["question", "answer", "question\n\nrule\n\nrule"]),
        ([U, A, S], ["question", "answer", "rule"]),
    ],
)
def test_other_templates_get_them_as_the_users(
    template: str, messages: list[dict[str, Any]], turns: list[str]
) -> None:
    roles = ["user", "assistant", "user"]
    expected = "".join(f"<{role}>{text}" for role, text in zip(roles, turns, strict=False))
    assert rendered(template, messages) == expected
    first = "<system>rule" if template is DROPS else "<user>rule"
    rest = expected if template is DROPS else expected.removeprefix("<user>")
    assert rendered(template, [S, *messages]) == first + rest


@pytest.mark.parametrize("template", [SHOWS, DROPS, TAKES_TURNS])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_rendered_stays_as_the_conversation_goes_on(template: str, seed: int) -> None:
    """Each turn's prompt begins with the one before, so that the cache finds all of that."""
    random = Random(seed)
    messages: list[dict[str, Any]] = [S] * random.randint(0, 1)
    for turn in range(6):
        messages.append({"role": "assistant" if turn % 2 else "user", "content": f"turn {turn}"})
        messages += [{"role": "system", "content": f"rule {turn}"}] * random.choice([0, 0, 1, 2])
    whole, before = rendered(template, messages), ""
    for count in range(1, len(messages) + 1):
        if any(message["role"] == "user" for message in messages[:count]):
            shown = rendered(template, messages[:count])
            assert shown.startswith(before)
            before = shown
    assert before == whole
