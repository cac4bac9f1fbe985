# SPDX-License-Identifier: Apache-2.0
"""Agents over several turns: what a client sends back is found in the cache, or it is said why.

A scripted model writes what models of its family write; the prefix cache is real. The templates are small
equivalents of the families' own, with the parts that matter here.
"""

# ruff: noqa: E501 (templates)

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from live_server import LiveServer, live_server
from scripted_engine import Asked, ScriptedEngine
from tiny_models import byte_level_tokenizer

from radixkv import PrefixCache
from radixkv.engine.outputs import OutputDelta, PromptOutcome
from radixkv.text.chat_formats import client_rules
from radixkv.text.tokenizer import Tokenizer

SPECIAL = [
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[ARGS]", "</s>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
]
CHATML = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = """
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.query %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SMOLLM3 = """
{%- if xml_tools %}<|im_start|>system
<tools>{% for t in xml_tools %}{{ t | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
Respond with {"name": function name, "parameters": dictionary}.<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}
{%- if true %}<|eot_id|>{% endif %}
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>
{{ m.content }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}"""
MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}
{%- elif m.tool_calls %}{{ m.content }}[TOOL_CALLS] [
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of tool calls must have nine characters') }}{% endif %}
{%- set function = call.function | tojson %}{{ function[:-1] }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"""
MISTRAL_ARGS = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}
{%- elif m.role == 'assistant' %}{{ m.content }}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"""
DEEPSEEK = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n'
 + call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
HARMONY = """
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' %}
{%- if m.thinking and m.tool_calls %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- for call in m.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ call.function.arguments | tojson }}<|call|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

ARGUMENTS = '{"city":"Paris",  "days": [1,2]}'
_FINAL = "It is sunny."


@dataclass(frozen=True)
class Family:
    """What a model of a family writes in three turns: a call, an answer to its result, another answer.

    Args:
        hints: turn -> why not all of what came before is found; empty: all is.
    """

    template: str
    call: str
    final: str = _FINAL
    hints: tuple[tuple[int, str], ...] = ()


_HERMES_CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
_DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
FAMILIES = {
    "hermes": Family(HERMES, "Let me look.\n" + _HERMES_CALL),
    "hermes, thinking": Family(
        HERMES,
        f"<think>\nHm.\n\nWell.\n</think>\n\n{_HERMES_CALL}",
        f"<think>\nSo.\n</think>\n\n{_FINAL}",
        hints=((2, client_rules.TEMPLATE_DROPS_REASONING),),
    ),
    "smollm2": Family(
        CHATML + "{# named SmolLM, trained by Hugging Face #}",
        f'<tool_call>[{{"name": "look", "arguments": {ARGUMENTS}}}]</tool_call>',
    ),
    "smollm3": Family(SMOLLM3, "Let me look.\n" + _HERMES_CALL),
    "llama3": Family(LLAMA3, f'{{"name": "look", "parameters": {ARGUMENTS}}}'),
    "mistral": Family(
        MISTRAL, f'Sure.[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}, "id": "abcdef123"}}]'
    ),
    "mistral, without ids": Family(
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}]',
        hints=((1, client_rules.ADDED_IDS),),
    ),
    "mistral-args": Family(MISTRAL_ARGS, f"Sure.[TOOL_CALLS]look[ARGS]{ARGUMENTS}"),
    "deepseek": Family(DEEPSEEK, "Let me look." + _DEEPSEEK_CALL),
    "deepseek, thinking": Family(
        DEEPSEEK,
        f"<think>\nHm.\n</think>\n\nLet me look.{_DEEPSEEK_CALL}",
        hints=((1, client_rules.TEMPLATE_DROPS_REASONING),),
    ),
    "harmony": Family(
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.look "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
        f"<|channel|>final<|message|>{_FINAL}",
        hints=((1, client_rules.OTHER_FORM),),
    ),
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


class TurnEngine(ScriptedEngine):
    """Answers each request with the next of `answers`, over a real prefix cache."""

    def __init__(self) -> None:
        wrapped = byte_level_tokenizer()
        wrapped.add_special_tokens({"additional_special_tokens": SPECIAL})
        wrapped.add_tokens(["<tool_call>", "</tool_call>", "</think>"])
        super().__init__(tokenizer=Tokenizer(wrapped), max_model_len=16384)
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self.prefix_cache = PrefixCache(4096, 16)
        self.answers: list[str] = []
        self.ends_at: list[int] = []  # tokens of each prompt with its answer

    async def _deltas(self, asked: Asked) -> AsyncIterator[OutputDelta]:
        ids = self.tokenizer.encode(self.answers.pop(0), add_special_tokens=False)
        lease = self.prefix_cache.acquire(asked.prompt, self.cache.namespace(asked.tenant, asked.salt))
        lease.take_copies()
        lease.copies_done()
        lease.commit(len(asked.prompt))
        found = PromptOutcome(len(asked.prompt), lease.num_cached_tokens, cache_report=lease.report)
        lease.append(ids)
        lease.commit(lease.num_tokens)
        self.ends_at.append(lease.num_tokens)
        lease.release()
        decoder = self.tokenizer.stream(
            asked.params.skip_special_tokens, kept=asked.params.kept_special_tokens
        )
        for number, token in enumerate(ids):
            last = number == len(ids) - 1
            yield OutputDelta(
                asked.request_id,
                0,
                decoder.push([token]) + (decoder.finish() if last else ""),
                [token],
                finish_reason="stop" if last else None,
                prompt=None if number else found,
                is_last=last,
            )


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(TurnEngine(), trust_request_chat_template=True) as running:
        yield running


class Agent:
    """A client that sends back what it got, word for word."""

    def __init__(self, server: LiveServer, family: Family, *, keeps_reasoning: bool = True) -> None:
        self.server = server
        server.engine.begin()
        self.family = family
        self.keeps_reasoning = keeps_reasoning
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather?"}]

    def turn(self, says: str) -> Any:
        """One turn in which the model says that; what it used. The answer joins the conversation."""
        engine = self.server.engine
        engine.answers.append(says)
        with self.server.openai() as client:
            answer = client.chat.completions.create(
                model="scripted",
                messages=self.messages,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                extra_body={"chat_template": self.family.template},
            )
        self.choice = answer.choices[0]
        message = self.choice.message.model_dump(exclude_none=True)
        if not self.keeps_reasoning:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        details = answer.usage.prompt_tokens_details.model_dump()
        return details["cached_tokens"], details["cache_miss"].get("hint")

    def result(self) -> None:
        (call,) = self.choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", ARGUMENTS)
        assert self.choice.finish_reason == "tool_calls"
        self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_tokens_grow_turn_by_turn(server: LiveServer, name: str) -> None:
    family, engine = FAMILIES[name], server.engine
    agent = Agent(server, family)
    found = [agent.turn(family.call)]
    agent.result()
    found.append(agent.turn(family.final))
    assert agent.choice.message.content == _FINAL
    assert agent.choice.finish_reason == "stop"
    agent.messages.append({"role": "user", "content": "And tomorrow?"})
    found.append(agent.turn(family.final))
    expected = dict(family.hints)
    for turn, (cached, hint) in enumerate(found[1:], 1):
        before = engine.ends_at[turn - 1]
        text = engine.tokenizer.decode(engine.requests[-3 + turn].prompt, skip_special_tokens=False)
        assert hint == expected.get(turn), text
        if turn in expected:
            assert found[0][0] < cached < before
        else:
            assert cached == before > found[turn - 1][0], text
    assert "look" in text
    assert "21 degrees" in text


def test_a_client_that_drops_the_reasoning_is_told(server: LiveServer) -> None:
    family = FAMILIES["hermes, thinking"]
    agent = Agent(server, family, keeps_reasoning=False)
    agent.turn(family.call)
    agent.result()
    assert agent.turn(family.final)[1] == client_rules.CLIENT_DROPS_REASONING


def test_a_client_that_writes_arguments_anew_is_told(server: LiveServer) -> None:
    family = FAMILIES["hermes"]
    agent = Agent(server, family)
    agent.turn(family.call)
    agent.result()
    agent.messages[1]["tool_calls"][0]["function"]["arguments"] = '{ "city": "Paris", "days": [1, 2] }'
    with server.http() as http:
        body = {"messages": agent.messages, "tools": [TOOL], "chat_template": family.template}
        explained = http.post("/v1/cache/explain", json=body).json()
    assert "send back the arguments as they came" in explained["advice"]
    breaker = explained["breaker"]
    assert (breaker["kind"], breaker["message"]) == ("arguments_reserialised", 1)
    assert breaker["place"] == "the assistant message"
    assert agent.turn(family.final)[1] == client_rules.RESERIALISED


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chain_of_responses_finds_what_chats_find(server: LiveServer, name: str) -> None:
    family, engine = FAMILIES[name], server.engine
    engine.begin()
    turns: list[Any] = []
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with server.openai() as client:

        def turn(says: str, given: Any) -> None:
            engine.answers.append(says)
            before = turns[-1].id if turns else None
            options: Any = {"tools": [tool], "extra_body": {"chat_template": family.template}}
            turns.append(
                client.responses.create(model="scripted", input=given, previous_response_id=before, **options)
            )

        turn(family.call, "What is the weather?")
        (call,) = (item for item in turns[0].output if item.type == "function_call")
        assert (call.name, call.arguments) == ("look", ARGUMENTS)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}
        turn(family.final, [result])
        assert turns[1].output_text == _FINAL
        turn(family.final, "And tomorrow?")
    cached = [answer.usage.input_tokens_details.cached_tokens for answer in turns]
    expected = dict(family.hints)
    for number in (1, 2):
        details = turns[number].usage.input_tokens_details
        assert details.cache_miss.get("hint") == expected.get(number)
        before = engine.ends_at[number - 1]
        if number in expected:
            assert cached[0] < cached[number] < before
        else:
            assert cached[number] == before > cached[number - 1]
