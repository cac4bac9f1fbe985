# SPDX-License-Identifier: Apache-2.0
"""Objects that a chat template prints as the JSON text they were read from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import byte_level_tokenizer

from radixkv.text.json_text import JsonText, read_json_text, render_json_texts
from radixkv.text.tokenizer import Tokenizer

ODD = '{"city":"Paris",  "days": [1,2],"note":"\\u00e9 <|im_end|>"}'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)
APART = (
    "{% for m in messages %}{% for k, v in m.tool_calls[0].arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}"
)


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "x", "tool_calls": [{"arguments": arguments}]}]


def test_only_unusual_writing_is_remembered() -> None:
    assert isinstance(read_json_text(ODD), JsonText)
    assert read_json_text(ODD) == json.loads(ODD)
    assert isinstance(read_json_text('{"a": "é"}'), JsonText)  # some templates escape it
    assert read_json_text("[1,2]") == [1, 2]
    with pytest.raises(ValueError):
        read_json_text("{")


@pytest.mark.parametrize("indent", [None, 1])
def test_printed_as_it_was(indent: int | None) -> None:
    values = {"a": [read_json_text(ODD), read_json_text("{ }")], "b": {"c": read_json_text('{"x":{"y":1}}')}}
    shown = render_json_texts(values, lambda data: json.dumps(data, indent=indent, ensure_ascii=False))
    assert shown.count(ODD) == 1
    assert "{ }" in shown
    assert '{"x":{"y":1}}' in shown
    assert "json-" not in shown
    assert json.loads(shown) == values


def test_a_template_prints_the_text_and_control_tokens_stay_text() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=TEMPLATE)
    ids = tokenizer.apply_chat_template(call(read_json_text(ODD)), add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>x{ODD}<|im_end|>"
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert ids.count(end[0]) == 1, "the one in the arguments is text"


def test_a_template_that_takes_arguments_apart_gets_them_plain() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), chat_template=APART)
    ids = tokenizer.apply_chat_template(call(read_json_text('{"a":1,"b":"c"}')), add_generation_prompt=False)
    assert tokenizer.decode(ids) == "a=1;b=c;"


def test_kept_special_tokens_stay_in_the_text() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    stream = tokenizer.stream(kept=("<|im_start|>",))
    assert stream.push(ids) + stream.finish() == "<|im_start|>a"
    assert tokenizer.chat_template is not None


def test_objects_within_one_that_is_taken_apart_are_printed_as_they_came() -> None:
    value = read_json_text('{"place": {"city":"Paris","at":{"x":1}}, "days":2}')

    def print_apart(data: dict[str, Any]) -> str:
        return "".join(f"<{key}>{json.dumps(item)}</{key}>" for key, item in data.items())

    assert render_json_texts(value, print_apart) == (
        '<place>{"city":"Paris","at":{"x":1}}</place><days>2</days>'
    )
    assert render_json_texts([value], json.dumps) == f"[{value.text}]"
