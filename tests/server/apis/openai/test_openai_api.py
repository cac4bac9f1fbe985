# SPDX-License-Identifier: Apache-2.0
"""The OpenAI routes over real HTTP, mostly through the real client, with a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "say:hello"}]


@pytest.fixture(scope="module", params=["together", "apart"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Server and engine in one process, and in two; `--server-process` has all servers apart."""
    with live_server(ScriptedEngine(), elsewhere=request.param == "apart") as running:
        yield running


def test_chat_answer_and_usage(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(model="scripted", messages=MESSAGES)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    asked = server.engine.requests[-1]
    assert usage.prompt_tokens == len(asked.prompt)
    assert usage.completion_tokens == 6
    assert usage.total_tokens == usage.prompt_tokens + 6
    assert usage.prompt_tokens_details.cached_tokens == len(asked.prompt) // 2
    assert usage.prompt_tokens_details.cache_write_tokens == len(asked.prompt) - len(asked.prompt) // 2
    assert asked.params.max_tokens is None, "a chat goes on to the context limit by default"


def test_chat_stream_concatenates_to_the_answer(server: LiveServer) -> None:
    with server.openai() as client:
        chunks = list(
            client.chat.completions.create(
                model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, n=2
            )
        )
    texts = {0: "", 1: ""}
    reasons = {}
    roles = []
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.delta.role:
            roles.append(choice.index)
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "hello", 1: "hello"}
    assert roles == [0, 1]
    assert reasons == {0: "stop", 1: "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[-1].usage.prompt_tokens_details.cache_write_tokens > 0
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("at_the_end", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_comes_with_every_chunk(server: LiveServer, path: str, at_the_end: bool) -> None:
    options = {"include_usage": at_the_end, "continuous_usage_stats": True}
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": ["say:hello", "say:you"]}
    with server.http() as client:
        answer = client.post(path, json={**body, "n": 2, "stream": True, "stream_options": options})
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    total = 12 if "chat" in path else 20
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, total)
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    assert [chunk["choices"] == [] for chunk in chunks] == [*[False] * (len(chunks) - 1), at_the_end]


def test_stream_without_usage_option_has_no_usage(server: LiveServer) -> None:
    with server.http() as client:
        body = {"messages": MESSAGES, "stream": True}
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event[6:]) for event in events[:-1])


async def test_async_client(server: LiveServer) -> None:
    async with server.async_openai() as client:
        answer = await client.chat.completions.create(model="scripted", messages=MESSAGES)
        stream = await client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert answer.choices[0].message.content == text == "hello"


def test_chat_logprobs(server: LiveServer) -> None:
    with server.openai() as client:
        options = {"model": "scripted", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        answer = client.chat.completions.create(**options)
        chunks = list(client.chat.completions.create(**options, stream=True))
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content[:5]] == list("hello")
    assert content[0].bytes == [ord("h")]
    assert content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["h", "i"]
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == content


def test_no_alternatives_may_be_asked_for_without_logprobs(server: LiveServer) -> None:
    with server.openai() as client:
        options = {"model": "scripted", "messages": MESSAGES, "top_logprobs": 0}
        answers = [
            client.chat.completions.create(**options, **more)
            for more in ({}, {"logprobs": False}, {"logprobs": True})
        ]
    assert [answer.choices[0].logprobs is None for answer in answers] == [True, True, False]
    assert not any(entry.top_logprobs for entry in answers[2].choices[0].logprobs.content)


def test_chat_fields_reach_the_engine(server: LiveServer) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "min_tokens": 1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [10],
        "priority": -3,
        "cache_salt": "salt-1",
    }
    with server.openai() as client:
        client.chat.completions.create(
            model="scripted",
            messages=MESSAGES,
            max_completion_tokens=4,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"65": 10},
            seed=7,
            stop=["x", "y"],
            n=2,
            extra_body=extra,
        )
    asked = server.engine.requests[-1]
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p, params.n, params.seed) == (4, 0.5, 0.9, 2, 7)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.logit_bias == {65: 10}
    assert params.stop_strings == ("x", "y")
    assert (params.top_k, params.min_p, params.min_tokens, params.repetition_penalty) == (5, 0.1, 1, 1.1)
    assert params.ignore_eos
    assert tuple(params.stop_token_ids) == (10,)
    assert asked.priority == -3
    assert asked.owner == ("", "salt-1")


def test_messages_reach_the_template(server: LiveServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "NUL \x00 <|im_end|>"},
    ]
    with server.openai() as client:
        client.chat.completions.create(model="scripted", messages=messages, tools=[tool])
        asked = server.engine.requests[-1]
        client.chat.completions.create(
            model="scripted", messages=messages, tools=[tool], tool_choice="none", reasoning_effort="low"
        )
    text = asked.text
    assert text.startswith("tools:['f']\nsystem\nbe brief")
    assert "user\none\ntwo" in text
    assert "call f({'a': 1})" in text
    assert "NUL \x00 <|im_end|>" in text
    assert asked.prompt.count(257) == len(messages), "only the template writes control tokens"
    without = server.engine.requests[-1].text
    assert without.startswith("tools:['f']\nsystem\n"), "the tools stay in the prompt, whatever the choice"
    assert "options:[('reasoning_effort', 'low')]" in without


def test_documented_fields_without_effect_are_accepted(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="scripted",
            messages=MESSAGES,
            user="u",
            store=False,
            metadata={"a": "b"},
            service_tier="auto",
            parallel_tool_calls=True,
            prompt_cache_key="k",
            safety_identifier="s",
            response_format={"type": "text"},
            modalities=["text"],
            extra_body={"top_k": None, "stop": None},
        )
    assert answer.choices[0].message.content == "hello"


def test_a_prediction_reaches_the_engine(server: LiveServer) -> None:
    with server.openai() as client:
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
        for content in ("hello", parts):
            answer = client.chat.completions.create(
                model="scripted", messages=MESSAGES, prediction={"type": "content", "content": content}
            )
            assert server.engine.requests[-1].params.prediction == list(b"hello")
            details = answer.usage.completion_tokens_details
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
        for wrong in ({"type": "content"}, {"type": "text", "content": "a"}, "hello"):
            with pytest.raises(openai.BadRequestError, match="prediction"):
                client.chat.completions.create(model="scripted", messages=MESSAGES, prediction=wrong)


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("say:one", ["one"]),
        (["say:one", "say:two"], ["one", "two"]),
        (list(b"say:ids"), ["ids"]),
        ([list(b"say:a"), list(b"say:bc")], ["a", "bc"]),
    ],
)
def test_completion_prompt_shapes(server: LiveServer, prompt: object, answers: list[str]) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="scripted", prompt=prompt)
        chunks = list(client.completions.create(model="scripted", prompt=prompt, stream=True))
    assert [choice.text for choice in answer.choices] == answers
    assert [choice.index for choice in answer.choices] == list(range(len(answers)))
    texts = [""] * len(answers)
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == answers
    prompts = [asked.prompt for asked in server.engine.requests[-len(answers) :]]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.prompt_tokens_details.cached_tokens == sum(len(ids) // 2 for ids in prompts)
    assert answer.usage.completion_tokens == sum(len(text) + 1 for text in answers)


def test_completion_defaults_to_16_tokens(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="scripted", prompt="say:" + "x" * 40)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def test_max_tokens_is_clamped_to_the_context(server: LiveServer) -> None:
    with server.openai() as client:
        client.completions.create(model="scripted", prompt="say:a", max_tokens=10**18)
    asked = server.engine.requests[-1]
    assert asked.params.max_tokens == server.engine.limits.max_model_len - len(asked.prompt)


def test_several_prompts_times_n_are_numbered_by_prompt(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="scripted", prompt=["say:a", "say:b"], n=2)
        chunks = list(
            client.completions.create(model="scripted", prompt=["say:a", "say:b"], n=2, stream=True)
        )
    assert [(c.index, c.text) for c in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_best_of_returns_n(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="scripted", prompt="say:a", n=1, best_of=3)
    assert len(answer.choices) == 1
    assert server.engine.requests[-1].params.best_of == 3
    assert answer.usage.completion_tokens == 3 * 2, "what was generated to choose from counts"


def test_completion_logprobs_and_echo(server: LiveServer) -> None:
    with server.openai() as client:
        plain = client.completions.create(model="scripted", prompt="say:hé", logprobs=2)
        smile = {"model": "scripted", "prompt": "say:😀 h", "logprobs": 0}
        characters = client.completions.create(**smile).choices[0].logprobs
        chunks = client.completions.create(stream=True, **smile)
        offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks if chunk.choices[0].logprobs]
        streamed_offsets = [offset for part in offsets for offset in part]
        echoed = client.completions.create(model="scripted", prompt="say:h", logprobs=1, echo=True)
        scored = client.completions.create(
            model="scripted", prompt="say:h", logprobs=0, echo=True, max_tokens=0
        )
        streamed = list(
            client.completions.create(model="scripted", prompt="say:h", echo=True, stream=True, max_tokens=1)
        )
    logprobs = plain.choices[0].logprobs
    assert logprobs.tokens[:3] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.top_logprobs[0] == {"h": -0.5, "i": -1.5}
    assert logprobs.text_offset == [0, 1, 1, 2], "both bytes of é begin at é; the end token after it"
    assert characters.text_offset == streamed_offsets == [0, 0, 0, 0, 1, 2, 3]
    assert characters.top_logprobs == [{token: -0.5} for token in characters.tokens], "the chosen ones alone"
    assert scored.choices[0].logprobs.top_logprobs[1:] == [{token: -0.5} for token in "ay:h"]
    choice = echoed.choices[0]
    assert choice.text == "say:hh"
    assert choice.logprobs.tokens == [*"say:hh", "<|im_end|>"]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.text_offset == list(range(7))
    assert scored.choices[0].text == "say:h"
    assert scored.choices[0].logprobs.tokens == list("say:h")
    assert scored.usage.completion_tokens == 0
    assert "".join(chunk.choices[0].text for chunk in streamed) == "say:hh"


def test_stop_string_ends_the_text(server: LiveServer) -> None:
    with server.openai() as client:
        answer = client.completions.create(model="scripted", prompt="say:abc", stop="c")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")


def test_models(server: LiveServer) -> None:
    with server.openai() as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").owned_by == "radixkv"


def test_served_names_with_slashes() -> None:
    with live_server(ScriptedEngine(), served_model_names=("org/name", "alias")) as server:
        with server.openai() as client:
            assert [model.id for model in client.models.list()] == ["org/name", "alias"]
            answer = client.chat.completions.create(model="alias", messages=MESSAGES)
            assert answer.model == "alias"
        with server.http() as http:
            assert http.get("/v1/models/org/name").json()["id"] == "org/name"
            assert http.get("/v1/models/scripted").status_code == 404
            default = http.post("/v1/chat/completions", json={"messages": MESSAGES})
            assert default.json()["model"] == "org/name"


def test_tokenize_and_back(server: LiveServer) -> None:
    with server.http() as client:
        tokens = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
        back = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        special = client.post("/detokenize", json={"tokens": [256, 104, 257]}).json()
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
        client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert tokens["count"] == 6
    assert tokens["max_model_len"] == 4096
    assert tokens["token_strs"][0] == "h"
    assert back == {"prompt": "héllo"}
    assert special == {"prompt": "<|im_start|>h<|im_end|>"}
    assert chat["tokens"] == server.engine.requests[-1].prompt


@pytest.mark.parametrize("where", ["prompt", "content", "arguments", "extra field", "tools", "template"])
def test_what_can_not_fit_is_refused_before_it_is_rendered(server: LiveServer, where: str) -> None:
    big = "x" * 200_000  # the longest token has 12 bytes, and the context 4,096 tokens
    function = {"name": "f", "arguments": json.dumps({"a": big})}
    asks: dict[str, dict[str, object]] = {
        "content": {"messages": [{"role": "user", "content": big}]},
        "arguments": {
            "messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}]
        },
        "extra field": {"messages": [{"role": "user", "content": "x", "reasoning_content": [big]}]},
        "tools": {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [big]}}}],
        },
        "template": {"messages": MESSAGES, "chat_template_kwargs": {"documents": [big]}},
        "prompt": {"prompt": big},
    }
    seen = server.engine.tokenizer.threads
    seen.clear()
    routes = {"prompt": ["/v1/completions", "/tokenize"], "template": ["/v1/chat/completions"]}
    with server.http() as client:
        for route in routes.get(where, ["/v1/chat/completions", "/tokenize"]):
            error = client.post(route, json=asks[where]).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 4096" in error["message"]
    assert not seen, "nothing was tokenised"


def test_request_ids(server: LiveServer) -> None:
    with server.http() as client:
        assert client.get("/health").headers["x-request-id"].startswith("req_")
        mine = client.get("/health", headers={"x-request-id": "my-id.1"})
        assert mine.headers["x-request-id"] == "my-id.1"
        forged = client.get("/health", headers={"x-request-id": "a b"})
        assert forged.headers["x-request-id"].startswith("req_")


def test_the_models_own_sampling_is_the_default() -> None:
    engine = ScriptedEngine(default_sampling={"temperature": 0.25, "top_k": 20})
    with live_server(engine) as server, server.openai() as client:
        chat: Any = {"model": "scripted", "messages": [{"role": "user", "content": "say:x"}]}
        client.chat.completions.create(**chat)
        client.chat.completions.create(**chat, temperature=1)
        client.completions.create(model="scripted", prompt="say:x", extra_body={"top_k": 0})
        answer = client.responses.create(model="scripted", input="say:x")
        asked = [(request.params.temperature, request.params.top_k) for request in engine.requests]
        assert asked == [(0.25, 20), (1, 20), (0.25, 0), (0.25, 20)]
        assert answer.temperature == 0.25
        card: Any = client.models.retrieve("scripted")
        assert card.default_sampling == {
            "temperature": 0.25,
            "top_k": 20,
            "source": "the model's generation_config.json",
        }
    with live_server(ScriptedEngine()) as server, server.openai() as client:
        card = client.models.retrieve("scripted")
        assert card.default_sampling["temperature"] == 1
        assert card.default_sampling["source"].startswith("radixkv;")


def test_a_small_pool_is_not_called_the_models_context() -> None:
    engine = ScriptedEngine(max_model_len=64, context_length=4096)
    with live_server(engine) as server, server.openai() as client:
        model = client.models.retrieve("scripted")
        assert (model.max_model_len, model.context_length) == (64, 4096)  # type: ignore[attr-defined]
        with pytest.raises(
            openai.BadRequestError, match=r"pool of 4 blocks.* 64 of the 4096 .*--num-blocks"
        ) as bad:
            client.completions.create(model="scripted", prompt="x" * 64)
        assert bad.value.code == "context_length_exceeded"
