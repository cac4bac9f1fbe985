# SPDX-License-Identifier: Apache-2.0
"""Histories as templates must get them: one call a message, ids with numbers, no messages of the system."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from writing_engine import tokenizer_with

from radixkv.text.chat_formats.derive import TemplateTraits, derive
from radixkv.text.chat_formats.formats import FORMATS
from radixkv.text.chat_formats.template_input import template_messages

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "look", "arguments": {}}}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


def test_a_template_with_one_call_a_message_gets_each_with_its_result() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "so", "tool_calls": [call("a"), call("b")]},
        *(result("b"), result("a")),
        {"role": "user", "content": "more"},
    ]
    given = template_messages(messages, [TOOL], FORMATS["llama3"], TemplateTraits(one_call=True))
    told = [(m["role"], [c["id"] for c in m.get("tool_calls", ())], m.get("tool_call_id")) for m in given]
    assert told == [
        ("user", [], None),
        ("assistant", ["a"], None),
        ("tool", [], "a"),
        ("assistant", ["b"], None),
        ("tool", [], "b"),
        ("user", [], None),
    ]


def test_ids_with_numbers_are_counted_through_the_conversation() -> None:
    own = "functions.look:7"
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call(own)]},
        *(result("a"), result(own)),
        {"role": "assistant", "content": "", "tool_calls": [call("b")]},
        result("b"),
    ]
    given = template_messages(messages, [TOOL], FORMATS["kimi-k2"], TemplateTraits())
    ids = [m.get("tool_call_id") or [c["id"] for c in m["tool_calls"]] for m in given]
    first, third = "functions.look:0", "functions.look:2"
    assert ids == [[first, own], first, own, [third], third]


def test_a_template_without_a_system_gets_the_tools_in_the_users_words() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    traits = TemplateTraits(tools=False, calls=False, results=False, system=False)
    (given,) = template_messages(messages, [TOOL], FORMATS["gemma"], traits)
    assert given["role"] == "user"
    assert given["content"].startswith("Be brief.")
    assert '"name": "look"' in given["content"]
    assert given["content"].endswith("hello")


def test_a_template_that_prints_arguments_as_they_are_gets_their_json() -> None:
    """An object would be printed as Python writes it, as Phi-4-mini's template does."""
    calls = (
        "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
    )
    compiled = jinja2.Template(f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}")
    _, traits = derive(FORMATS["phi4"], lambda messages, tools, options: compiled.render(messages=messages))
    asked = call("a")
    asked["function"]["arguments"] = {"a": "b"}
    said = {"role": "assistant", "content": "", "tool_calls": [asked]}
    given = template_messages([said], (), FORMATS["phi4"], traits)
    assert compiled.render(messages=given) == '<call>look {"a": "b"}</call>'


def test_marks_of_calls_in_a_message_are_tokens_and_all_else_is_text() -> None:
    """The model had generated them so; what a user spells is text, also among the arguments."""
    tokenizer = tokenizer_with(
        ["<tool_call>", "</tool_call>"], "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    known = FORMATS["hermes"].with_vocabulary(["<tool_call>", "</tool_call>"])
    asked = call("a")
    asked["function"]["arguments"] = {"a": "<tool_call>"}
    said = {"role": "assistant", "content": "a <tool_call>", "tool_calls": [asked]}
    traits = TemplateTraits(calls=False)
    prompt = tokenizer.apply_chat_template(template_messages([said], (), known, traits))
    marks = [tokenizer.encode(mark, add_special_tokens=False) for mark in known.special_tokens]
    assert [prompt.count(token) for (token,) in marks] == [1, 1]
    text = 'a <tool_call>\n<tool_call>\n{"name": "look", "arguments": {"a": "<tool_call>"}}\n</tool_call>'
    assert tokenizer.decode(prompt, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("in_user", "in_result", "shows"),
    [
        ("[IMG]", "[IMG]", True),
        ("<IMG>", " <IMG> ", True),
        ("[IMG]", "", False),
        ("", "", True),
    ],
)
def test_a_template_may_leave_images_out_of_results(in_user: str, in_result: str, shows: bool) -> None:
    text = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% elif m.role == 'tool' %}"
        f"{in_result}{{% else %}}{in_user}{{% endif %}}{{% endfor %}}{{% endif %}}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
        "{% endfor %}"
    )
    compiled = jinja2.Template(text)
    _, traits = derive(FORMATS["phi4"], lambda messages, tools, options: compiled.render(messages=messages))
    assert traits.images_in_results is shows


def test_a_template_that_prints_a_list_of_parts_shows_no_images_in_results() -> None:
    text = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' or m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text or '[IMG]' }}{% endfor %}{% endif %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"
        "{% endfor %}"
    )
    compiled = jinja2.Template(text)
    _, traits = derive(FORMATS["phi4"], lambda messages, tools, options: compiled.render(messages=messages))
    assert not traits.images_in_results
