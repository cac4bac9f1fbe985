# SPDX-License-Identifier: Apache-2.0
"""Where breakpoints end in the prompts of templates that put things in different places."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

from radixkv.text.json_text import read_json_text
from radixkv.text.tokenizer import Tokenizer
from radixkv_server.chats.breakpoints import Breakpoint, prefix_pins
from radixkv_server.chats.chat import Chat
from radixkv_server.chats.render import chat_prompt
from radixkv_server.context import ServerContext
from radixkv_server.settings import ServerSettings

CHATML = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if loop.first and m.role == 'system' %}
{{ m.content }}
{%- if tools %}
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools>{% endif %}
{%- else %}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Trims, and shows tools inside of the first user's message.
LLAMA = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.role == 'user' and tools and not told.done %}{% set told.done = true %}
{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor %}{% endif %}
{{ m.content | trim }}
{%- for call in m.tool_calls or [] %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
LLAMA = "{%- set told = namespace(done=false) %}" + LLAMA
# Shows tools before the last user's message.
MISTRAL = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS] {{ call.function.arguments | tojson }}{% endfor %}
{%- endif %}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
TOKENIZERS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("one", "two", "three")
]
CALL = {"id": "c1234abcd", "type": "function", "function": {"name": "one"}}
WRITTEN = '{"a":  1,"b": [2]}'


def messages() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Rules of 12"},
        {"role": "user", "content": "First part\n34 second part"},
        {
            "role": "assistant",
            "content": "Well. ",
            "reasoning_content": "Hm.",
            "tool_calls": [{**CALL, "function": {**CALL["function"], "arguments": read_json_text(WRITTEN)}}],
        },
        {"role": "tool", "tool_call_id": CALL["id"], "content": "rain 5"},
        {"role": "user", "content": "And now?"},
    ]


#: A breakpoint, and what its prefix ends with.
PLACES = [
    (Breakpoint(300.0, tool=1), '"name": "two"'),
    (Breakpoint(300.0, tool=2), '"name": "three"'),
    (Breakpoint(300.0, message=0, chars=len("Rules of 12")), "Rules of 12"),
    (Breakpoint(300.0, message=1, chars=len("First part")), "First part"),
    (Breakpoint(300.0, message=1, chars=len("First part\n34 second part")), "34 second part"),
    (Breakpoint(300.0, message=2, chars=5), "Well."),
    (Breakpoint(300.0, message=2, call=0), WRITTEN[:-1]),
    (Breakpoint(300.0, message=3, chars=len("rain 5")), "rain 5"),
    (Breakpoint(300.0, message=4, chars=len("And now?")), "And now?"),
]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prefix_ends_where_the_block_does(template: str, tokenizer: str) -> None:
    text = Tokenizer(TOKENIZERS[tokenizer](), chat_template=TEMPLATES[template])
    engine = ScriptedEngine(tokenizer=text)
    context = ServerContext.for_engine(engine, ServerSettings())
    chat = Chat(source=messages(), convert=messages, tools=TOOLS)

    async def find() -> list[tuple[str, str, str]]:
        ids = (await chat_prompt(context, chat)).ids
        whole = text.decode(ids, skip_special_tokens=False)
        found = []
        for place, end in PLACES:
            (prefix,) = await prefix_pins(context, chat, [place], engine.limits.encode(ids))
            shown, further = (
                text.decode(ids[: prefix.num_tokens + more], skip_special_tokens=False) for more in (0, 1)
            )
            assert whole.startswith(shown)
            found.append((shown, further, end))
        return found

    for shown, further, end in asyncio.run(find()):
        # The last token may hold the block's end and what follows: it is not the prefix's alone.
        assert end in further[-140:], (end, further)
        # And what closes a tool's definition or a call is no text of the block.
        after = shown[shown.rindex(end) + len(end) :] if end in shown else ""
        assert set(after) <= set('{}[]"\n ,:') | set("parameterstypeobject"), (end, after)
