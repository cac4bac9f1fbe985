# SPDX-License-Identifier: Apache-2.0
"""The Messages API over a real socket, with Anthropic's own SDK."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from live_server import LiveServer

ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 100}
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather somewhere.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rendered(server: LiveServer) -> str:
    """The last prompt that the engine got, control tokens left out."""
    return server.engine.requests[-1].text


def adds_up(usage: anthropic.types.Usage, prompt: int) -> bool:
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(parts) == prompt


def test_an_answer(server: LiveServer, client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[user("say:hello")], **ASK)
    assert (message.type, message.role, message.model) == ("message", "assistant", "scripted")
    assert message.id.startswith("msg_")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id
    asked = server.engine.requests[-1]
    assert asked.owner == ("ada", "")
    assert asked.params.max_tokens == 100
    assert message.usage.output_tokens == 6
    assert adds_up(message.usage, len(asked.prompt))
    assert message.usage.cache_creation_input_tokens == 0, "nothing was asked to be kept"


def test_a_stream_has_its_events_in_order(client: anthropic.Anthropic) -> None:
    with client.messages.stream(messages=[user("say:(hm)yes<f{}><g{}>")], **ASK) as stream:
        events = list(stream)
        final = stream.get_final_message()
    raw = [event.type for event in events if event.type.startswith(("message", "content_block"))]
    one = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [one[0], *[one[1]] * 3, one[2]]  # two characters and the signature
    said = [one[0], *[one[1]] * 3, one[2]]
    called = [one[0], *[one[1]] * 2, one[2]]
    assert raw == ["message_start", *thought, *said, *called, *called, "message_delta", "message_stop"]
    thinking, text, first, second = final.content
    assert (thinking.thinking, text.text) == ("hm", "yes")
    assert thinking.signature
    assert (first.name, first.input, second.name) == ("f", {}, "g")
    assert first.id != second.id
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == 18
    start = next(event for event in events if event.type == "message_start")
    assert start.message.usage.cache_read_input_tokens == final.usage.cache_read_input_tokens > 0
    assert start.message.usage.input_tokens == final.usage.input_tokens


def test_events_as_they_are_sent(server: LiveServer) -> None:
    with server.http(headers={"x-api-key": "key-a"}) as client:
        body = {**ASK, "messages": [user("say:a")], "stream": True}
        answer = client.post("/v1/messages?beta=true", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    assert [name for name, _ in events] == [
        "event: message_start",
        "event: content_block_start",
        "event: ping",
        "event: content_block_delta",
        "event: content_block_stop",
        "event: message_delta",
        "event: message_stop",
    ]
    for name, data in events:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    delta = json.loads(events[-2][1].removeprefix("data: "))
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 2


async def test_the_async_client(server: LiveServer) -> None:
    async with server.async_anthropic("key-b") as client:
        message = await client.messages.create(messages=[user("say:hi")], **ASK)
        async with client.messages.stream(messages=[user("say:hi")], **ASK) as stream:
            texts = [text async for text in stream.text_stream]
    assert message.content[0].text == "".join(texts) == "hi"
    assert server.engine.requests[-1].owner == ("bob", "")


def test_the_beta_client_and_a_bearer_token(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token="key-b", api_key=None) as client:
        message = client.beta.messages.create(
            messages=[user("say:hi")], betas=["prompt-caching-2024-07-31"], **ASK
        )
    assert message.content[0].text == "hi"
    assert server.engine.requests[-1].owner == ("bob", "")


@pytest.mark.parametrize(
    ("options", "reason", "sequence", "text"),
    [
        ({"max_tokens": 2}, "max_tokens", None, "ab"),
        ({"stop_sequences": ["x", "bc"]}, "stop_sequence", "bc", None),
        ({}, "end_turn", None, "abcd"),
    ],
)
def test_why_an_answer_ends(
    client: anthropic.Anthropic, options: dict[str, Any], reason: str, sequence: str | None, text: str | None
) -> None:
    ask = {**ASK, **options, "messages": [user("say:abcd")]}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
        assert text in (None, message.content[0].text)


def test_sampling_and_what_changes_nothing(server: LiveServer, client: anthropic.Anthropic) -> None:
    client.messages.create(
        messages=[user("hi")],
        metadata={"user_id": "u"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "cache_salt": "s"},
        **ASK,
    )
    asked = server.engine.requests[-1]
    assert (asked.params.temperature, asked.params.top_p, asked.params.top_k) == (0.5, 0.9, 7)
    assert asked.salt == "s"


def test_what_the_template_gets(server: LiveServer, client: anthropic.Anthropic) -> None:
    client.messages.create(
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
        messages=[
            user("one"),
            user([{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]),
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            user("four"),
        ],
        **ASK,
    )
    turns = "system\nBe brief.\nBe kind.", "user\none\ntwo\nthree", "assistant\nab", "user\nfour"
    assert rendered(server) == "".join(turns) + "assistant\n"


def test_a_last_message_of_the_assistant_is_continued(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    client.messages.create(messages=[user("x"), {"role": "assistant", "content": "Well"}], **ASK)
    assert rendered(server) == "user\nxassistant\nWelloptions:[('continue_final_message', True)]"


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        (
            {"type": "enabled", "budget_tokens": 1024},
            "[('enable_thinking', True), ('thinking_budget', 1024)]",
        ),
        ({"type": "disabled"}, "[('enable_thinking', False), ('thinking_budget', 0)]"),
        ({"type": "adaptive"}, None),
    ],
)
def test_thinking_is_the_templates(
    server: LiveServer, client: anthropic.Anthropic, thinking: Any, told: str | None
) -> None:
    client.messages.create(messages=[user("x")], **{**ASK, "max_tokens": 2000}, thinking=thinking)
    end = "assistant\n" if told is None else f"options:{told}assistant\n"
    assert rendered(server) == "user\nx" + end


def test_a_turn_with_tools_comes_back_as_it_was_written(
    server: LiveServer, client: anthropic.Anthropic
) -> None:
    ask = {**ASK, "tools": [TOOL]}
    question = user('say:(why)Sure.<get_weather{"city" : "Oslo","deep":{"n":1.0}}>')
    message = client.messages.create(messages=[question], **ask)
    assert "tools:['get_weather']" in rendered(server)
    call = message.content[2]
    assert call.input == {"city": "Oslo", "deep": {"n": 1.0}}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    again = [question, {"role": "assistant", "content": message.content}, user([result])]
    seen: list[dict[str, Any]] = []
    render = server.engine.render_chat

    async def watched(messages: Any, **options: Any) -> Any:
        seen.extend(messages)
        return await render(messages, **options)

    server.engine.render_chat = watched
    try:
        client.messages.create(messages=again, **ask)
        with server.anthropic("key-b") as other:
            other.messages.create(messages=again, **ask)
    finally:
        del server.engine.render_chat
    assistant, tool = seen[1], seen[2]
    assert (assistant["content"], assistant["reasoning_content"]) == ("Sure.", "why")
    function = assistant["tool_calls"][0]["function"]
    assert function["arguments"].text == '{"city" : "Oslo","deep":{"n":1.0}}'
    assert tool == {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "rain"}
    assert not hasattr(seen[4]["tool_calls"][0]["function"]["arguments"], "text"), "each tenant's own"


def test_a_changed_input_is_taken_as_it_is(server: LiveServer, client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=[user('say:<f{"a":1}>')], tools=[TOOL], **ASK)
    call = message.content[0].to_dict()
    for made in ({"a": True}, {"a": 2}, {"a": 1, "b": 2}, {}):
        turns = [user("x"), {"role": "assistant", "content": [{**call, "input": made}]}]
        turns.append(user([{"type": "tool_result", "tool_use_id": call["id"]}]))
        client.messages.create(messages=turns, **ASK)
        assert f"call f({made!r})" in rendered(server)


def test_hidden_thinking_comes_back_through_its_signature(client: anthropic.Anthropic) -> None:
    ask = {**ASK, "messages": [user("say:(hm.)yes")]}
    ask["thinking"] = {"type": "adaptive", "display": "omitted"}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    shown = client.messages.create(**{**ASK, "messages": [user("say:(hm.)yes")]})
    counts = []
    for message in (whole, streamed, shown):
        turns = [user("x"), {"role": "assistant", "content": message.content}, user("y")]
        counts.append(client.messages.count_tokens(model="scripted", messages=turns).input_tokens)
    assert whole.content[0].thinking == streamed.content[0].thinking == ""
    assert whole.content[0].signature == streamed.content[0].signature
    assert shown.content[0].thinking == "hm."
    assert len(set(counts)) == 1


def test_tokens_are_counted_as_they_would_be_sent(server: LiveServer, client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "system": "Be brief.",
        "messages": [user("hello")],
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    before = len(server.engine.requests)
    counted = client.messages.count_tokens(model="scripted", **ask).input_tokens
    assert len(server.engine.requests) == before
    client.messages.create(**ask, **ASK)
    assert counted == len(server.engine.requests[-1].prompt)
    uncalled = client.messages.count_tokens(model="scripted", **{**ask, "tool_choice": {"type": "none"}})
    assert uncalled.input_tokens == counted, "the tools stay in the prompt"
    without = {name: value for name, value in ask.items() if not name.startswith("tool")}
    assert client.messages.count_tokens(model="scripted", **without).input_tokens < counted


def test_models(client: anthropic.Anthropic) -> None:
    page = client.models.list()
    assert [model.id for model in page] == ["scripted"]
    assert (page.has_more, page.first_id) == (False, "scripted")
    model = client.models.retrieve("scripted")
    assert (model.type, model.display_name, model.lifecycle) == ("model", "scripted", "active")
    assert model.created_at.tzinfo is not None


def test_a_header_of_the_version_is_not_needed(server: LiveServer) -> None:
    body = {**ASK, "messages": [user("say:x")]}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "key-a"})
    assert answer.json()["content"] == [{"type": "text", "text": "x"}]


def last_text(server: LiveServer, client: anthropic.Anthropic, **body: Any) -> str:
    client.beta.messages.create(**{**ASK, "messages": [user("say:ok")], **body})
    return rendered(server)


def test_documents_and_search_results(server: LiveServer, client: anthropic.Anthropic) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    parts = {
        "type": "content",
        "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
    }
    found = {
        "type": "search_result",
        "title": "Rome",
        "source": "http://rome",
        "content": [{"type": "text", "text": "Old."}],
        "citations": {"enabled": False},
    }
    text = last_text(
        server,
        client,
        messages=[
            user(
                [
                    {"type": "document", "source": plain, "title": "Oslo", "context": "today"},
                    {"type": "document", "source": parts, "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "say:ok"},
                ]
            ),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "c", "content": [found]}]),
        ],
    )
    assert "user\nOslo\ntoday\nIt rains.\nOne.\nTwo.\nsay:ok" in text
    assert "tool\nRome\nhttp://rome\nOld." in text


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_summary_stands_for_what_was_before(
    server: LiveServer, client: anthropic.Anthropic, role: str
) -> None:
    def ask(content: str | None) -> str:
        summary = {"type": "compaction", "content": content, "signature": "x"}
        return last_text(
            server,
            client,
            system="Be brief.",
            messages=[
                user("long ago"),
                {"role": "assistant", "content": "yes"},
                {
                    "role": role,
                    "content": [
                        {"type": "text", "text": "earlier"},
                        summary,
                        {"type": "text", "text": "then"},
                    ],
                },
                user("say:ok"),
            ],
        )

    text = ask("It was nice.")
    assert "Be brief." in text
    assert "long ago" not in text
    assert "earlier" not in text
    assert text.index("It was nice.") < text.index("then") < text.index("say:ok")
    text = ask(None)
    assert text.index("long ago") < text.index("earlier") < text.index("then")


def test_messages_of_the_system_for_one_turn(server: LiveServer, client: anthropic.Anthropic) -> None:
    def system(text: str, **more: Any) -> dict[str, Any]:
        return {"role": "system", "content": text, **more}

    once = system("for now", clear_at="next_user_message")
    said = {"role": "assistant", "content": "yes"}
    assert "for now" in last_text(server, client, messages=[user("say:ok"), once])
    assert "for now" in last_text(server, client, messages=[user("say:ok"), once, said])
    text = last_text(server, client, messages=[user("one"), once, said, system("always"), user("say:ok")])
    assert "for now" not in text
    assert "always" in text
    effort = [{"role": "system", "output_config": {"effort": "low"}}, user("say:ok")]
    text = last_text(server, client, messages=effort, output_config={"effort": "high"})
    assert "'reasoning_effort', 'low'" in text


def test_known_tools_have_their_schemas(server: LiveServer, client: anthropic.Anthropic) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory", "cache_control": {"type": "ephemeral"}},
        TOOL,
    ]
    text = last_text(server, client, tools=tools)
    assert text.startswith("tools:['bash', 'str_replace_based_edit_tool', 'memory', 'get_weather']")
    last_text(server, client, tools=tools, tool_choice={"type": "tool", "name": "memory"})
    assert "rename" in server.engine.requests[-1].params.structured.grammar


def test_tools_that_come_later(server: LiveServer, client: anthropic.Anthropic) -> None:
    """They can be called, and the list of tools stays what it was."""
    later = {**TOOL, "name": "later", "defer_loading": True, "description": "Comes later."}
    defined = {**TOOL, "name": "defined", "description": "Was defined."}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": defined}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}},
    ]
    messages = [user("say:ok"), {"role": "system", "content": changes}]
    text = last_text(server, client, tools=[later, TOOL], messages=messages)
    assert text.startswith("tools:['get_weather']\n")
    assert (
        text.index("Comes later.") < text.index("Was defined.") < text.index("can't be called: get_weather")
    )
    for name in ("later", "defined", "get_weather"):
        last_text(
            server,
            client,
            tools=[later, TOOL],
            messages=messages,
            tool_choice={"type": "tool", "name": name},
        )
        assert f'"{name}' in server.engine.requests[-1].params.structured.grammar.replace("\\", "")
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    text = last_text(server, client, tools=[later, TOOL, search])
    assert text.startswith("tools:['later', 'get_weather']\n"), "no server searches: all are there"


def test_nothing_to_be_said(server: LiveServer, client: anthropic.Anthropic) -> None:
    """`max_tokens: 0` is for the cache alone."""
    ask = {**ASK, "max_tokens": 0, "messages": [user("say:hello")]}
    message = client.messages.create(**ask)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0
    assert server.engine.requests[-1].params.max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, "tool_choice"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "output_config",
        ),
        ({"output_format": {"type": "json_schema", "schema": {"type": "object"}}}, "output_config.format"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_a_prewarm_says_nothing_of_an_answer(
    client: anthropic.Anthropic, fields: dict[str, Any], param: str
) -> None:
    ask = {**ASK, "max_tokens": 0, "messages": [user("say:hello")], **fields}
    with pytest.raises(anthropic.BadRequestError, match=param):
        client.post("/v1/messages", body=ask, cast_to=object)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": {"type": "auto"}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "disabled"}, "stream": False},
    ],
)
def test_a_prewarm_takes_what_shapes_the_prompt(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    message = client.messages.create(**{**ASK, "max_tokens": 0, "messages": [user("say:hello")], **fields})
    assert (message.content, message.stop_reason) == ([], "max_tokens")


def test_between_tools(server: LiveServer, client: anthropic.Anthropic) -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    result = user([{"type": "tool_result", "tool_use_id": "c", "content": "say:ok"}])
    for messages, thinks in (([user("say:ok")], False), ([user("x"), call, result], True)):
        text = last_text(server, client, messages=messages, thinking={"type": "between_tools"})
        assert f"'enable_thinking', {thinks}" in text
