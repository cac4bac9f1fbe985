# SPDX-License-Identifier: Apache-2.0
"""vLLM's fields about tokens, over real HTTP: what may be generated, and what is told of ids and logprobs."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from paged_language_model import VOCAB, LetterTokenizer, make_engine

from radixkv.entrypoints.async_engine import AsyncEngine

PROMPT = "the prompt of these tests"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 20}


class Tokenizer(LetterTokenizer):
    """Encodes to what decodes to the same text; a space is no letter of an answer."""

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        return [(ord(letter) - 33) % VOCAB for letter in text]

    def apply_chat_template(self, messages: Any, *arguments: object, **options: object) -> list[int]:
        parts = (message["content"] for message in messages)
        return self.encode("".join(part if isinstance(part, str) else "" for part in parts))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = AsyncEngine(make_engine(num_blocks=256, block_size=8, tokenizer=Tokenizer())[0])
    with live_server(engine, api_keys=("ada=a", "bob=b")) as running:
        yield running

    async def check_and_close() -> None:
        await engine.call(lambda inner: inner.check())
        assert await engine.call(lambda inner: inner.cache.stats.held_blocks) == 0
        await engine.close()

    asyncio.run(check_and_close())


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"Authorization": "Bearer a"}) as made:
        yield made


def body_of(route: str, **fields: Any) -> dict[str, Any]:
    if route == "chat":
        return {"messages": [{"role": "user", "content": PROMPT}], **GREEDY, **fields}
    return {"prompt": PROMPT, **GREEDY, **fields}


def ask(client: httpx.Client, route: str, **fields: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/{route_path(route)}", json=body_of(route, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: httpx.Client, route: str, **fields: Any) -> list[dict[str, Any]]:
    body = body_of(route, stream=True, **fields)
    with client.stream("POST", f"/v1/{route_path(route)}", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def route_path(route: str) -> str:
    return "chat/completions" if route == "chat" else "completions"


def texts(answer: dict[str, Any]) -> list[str]:
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in answer["choices"]
    ]


both = pytest.mark.parametrize("route", ["chat", "text"])


@both
class TestWhatMayBeGenerated:
    def test_bad_words_are_not(self, client: httpx.Client, route: str) -> None:
        (free,) = texts(ask(client, route))
        words = [free[2], free[4:7], " " + free[8:10]]
        (held,) = texts(ask(client, route, bad_words=words))
        assert held != free
        assert not any(word.strip() in held for word in words)
        chunks = stream(client, route, bad_words=words)
        said = "".join(
            (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            for chunk in chunks
            for choice in chunk["choices"]
        )
        assert said == held
        assert texts(ask(client, route, bad_words=[])) == [free]

    def test_only_allowed_tokens_are(self, client: httpx.Client, route: str) -> None:
        answer = ask(client, route, allowed_token_ids=[40, 41, 42], temperature=2, n=4, return_token_ids=True)
        assert {token for choice in answer["choices"] for token in choice["token_ids"]} <= {40, 41, 42}

    def test_beside_a_grammar_both_hold(self, client: httpx.Client, route: str) -> None:
        fields = {"structured_outputs": {"regex": "[A-F]{8}"}, "bad_words": ["A", "BC"], "temperature": 1.5}
        for text in texts(ask(client, route, n=5, **fields)):
            assert len(text) == 8
            assert set(text) <= set("BCDEF")
            assert "BC" not in text

    def test_where_nothing_is_left_the_request_fails_and_no_other(
        self, client: httpx.Client, route: str
    ) -> None:
        body = body_of(route, structured_outputs={"choice": ["AAA", "AAB"]}, bad_words=["AA"])
        answer = client.post(f"/v1/{route_path(route)}", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_token_left"
        assert ask(client, route)["choices"][0]["finish_reason"] == "length"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"bad_words": "word"}, "bad_words"),
            ({"bad_words": [""]}, "bad_words"),
            ({"bad_words": [3]}, "bad_words[0]"),
            ({"bad_words": [["a"]]}, "bad_words[0]"),
            ({"bad_words": ["a"] * 1025}, "bad_words"),
            ({"bad_words": ["a" * 1025]}, "bad_words"),
            ({"bad_words": [f"{i:04}" * 200 for i in range(30)]}, "bad_words"),
            ({"bad_words": [chr(33 + token) for token in range(VOCAB)]}, "bad_words"),
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
            ({"allowed_token_ids": [5, -1]}, "allowed_token_ids"),
            ({"allowed_token_ids": [2**70]}, "allowed_token_ids"),
            ({"allowed_token_ids": [1.0]}, "allowed_token_ids[0]"),
            ({"allowed_token_ids": [True]}, "allowed_token_ids[0]"),
            ({"allowed_token_ids": 5}, "allowed_token_ids"),
            ({"allowed_token_ids": [7], "bad_words": [chr(33 + 7)]}, "allowed_token_ids"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"prompt_logprobs": True}, "prompt_logprobs"),
            ({"return_token_ids": 1}, "return_token_ids"),
            ({"return_tokens_as_token_ids": "yes"}, "return_tokens_as_token_ids"),
        ],
    )
    def test_bad_values_are_refused_by_name(
        self, client: httpx.Client, route: str, fields: dict[str, Any], param: str
    ) -> None:
        answer = client.post(f"/v1/{route_path(route)}", json=body_of(route, **fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


class TestTokenIds:
    @both
    def test_are_told_whole_and_in_streams(self, client: httpx.Client, route: str) -> None:
        prompt = Tokenizer().encode(PROMPT)
        answer = ask(client, route, return_token_ids=True, n=2, seed=3, temperature=1)
        holders = [answer] if route == "chat" else answer["choices"]
        assert all(holder["prompt_token_ids"] == prompt for holder in holders)
        wanted = {choice["index"]: choice["token_ids"] for choice in answer["choices"]}
        assert all(len(ids) == 20 for ids in wanted.values())
        for choice, text in zip(answer["choices"], texts(answer), strict=True):
            assert Tokenizer().decode(choice["token_ids"]) == text
        chunks = stream(client, route, return_token_ids=True, n=2, seed=3, temperature=1)
        told: dict[int, list[int]] = {0: [], 1: []}
        for chunk in chunks:
            for choice in chunk["choices"]:
                told[choice["index"]] += choice.get("token_ids") or []
        assert told == wanted
        if route == "chat":
            assert [chunk.get("prompt_token_ids") for chunk in chunks] == [prompt] + [None] * (
                len(chunks) - 1
            )
        else:
            firsts = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
            assert [firsts[index]["prompt_token_ids"] for index in (0, 1)] == [prompt] * 2
            assert sum("prompt_token_ids" in chunk["choices"][0] for chunk in chunks) == 2

    @both
    def test_are_not_told_unasked(self, client: httpx.Client, route: str) -> None:
        for fields in ({}, {"return_token_ids": False, "prompt_logprobs": None}):
            answer = json.dumps(ask(client, route, **fields)) + json.dumps(stream(client, route, **fields))
            assert "token_ids" not in answer
            assert "prompt_logprobs" not in answer

    @both
    def test_those_that_end_an_answer_are_told(self, client: httpx.Client, route: str) -> None:
        free = ask(client, route, return_token_ids=True)["choices"][0]["token_ids"]
        stop = free[6]
        held = free[: free.index(stop) + 1]
        asked = {"return_token_ids": True, "stop_token_ids": [stop]}
        assert ask(client, route, **asked)["choices"][0]["token_ids"] == held
        chunks = stream(client, route, **asked)
        assert [t for c in chunks for t in c["choices"][0].get("token_ids") or []] == held

    def test_of_several_prompts_each_has_its_own(self, client: httpx.Client) -> None:
        prompts = ["one", "and two"]
        answer = ask(client, "text", prompt=prompts, return_token_ids=True, max_tokens=2)
        told = [choice["prompt_token_ids"] for choice in answer["choices"]]
        assert told == [Tokenizer().encode(prompt) for prompt in prompts]

    def test_text_that_is_held_back_holds_no_ids_back(self, client: httpx.Client) -> None:
        (text,) = texts(ask(client, "text"))
        chunks = stream(client, "text", return_token_ids=True, stop=[text[3:7] + "~", "never said"])
        assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == Tokenizer().encode(text)

    @both
    def test_tokens_are_named_by_their_ids_in_logprobs(self, client: httpx.Client, route: str) -> None:
        asked: dict[str, Any] = {
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "max_tokens": 3,
        }
        asked |= {"logprobs": True, "top_logprobs": 2} if route == "chat" else {"logprobs": 2}
        choice = ask(client, route, **asked)["choices"][0]
        named = [f"token_id:{token}" for token in choice["token_ids"]]
        if route == "chat":
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == named
            tops = [[top["token"] for top in entry["top_logprobs"]] for entry in entries]
            assert [entry["bytes"] for entry in entries] == [
                list(chr(33 + token).encode()) for token in choice["token_ids"]
            ]
        else:
            assert choice["logprobs"]["tokens"] == named
            tops = [list(top) for top in choice["logprobs"]["top_logprobs"]]
        assert [top[0] for top in tops] == named
        assert all(name.startswith("token_id:") for top in tops for name in top)
        # Without logprobs there is nothing to be named.
        assert "token_id:" not in json.dumps(ask(client, route, return_tokens_as_token_ids=True))


def check_prompt_logprobs(told: list[Any], prompt: list[int], num_top: int) -> None:
    assert told[0] is None
    assert len(told) == len(prompt)
    for token, entry in zip(prompt[1:], told[1:], strict=True):
        assert num_top <= len(entry) <= num_top + 1
        assert next(iter(entry)) == str(token)
        own = entry[str(token)]
        assert own["decoded_token"] == chr(33 + token)
        assert own["rank"] >= 1
        ranked = sorted(entry.values(), key=lambda item: item["rank"])
        assert [item["rank"] for item in ranked][:num_top] == list(range(1, num_top + 1))
        assert all(a["logprob"] >= b["logprob"] for a, b in itertools.pairwise(ranked))
        assert all(item["logprob"] <= 0 for item in ranked)


class TestPromptLogprobs:
    @both
    @pytest.mark.parametrize("num_top", [0, 1, 5])
    def test_are_told_whole_and_in_streams(self, client: httpx.Client, route: str, num_top: int) -> None:
        prompt = Tokenizer().encode(PROMPT)
        answer = ask(client, route, prompt_logprobs=num_top, n=2, temperature=1)
        told = answer["prompt_logprobs"] if route == "chat" else answer["choices"][0]["prompt_logprobs"]
        check_prompt_logprobs(told, prompt, num_top)
        if route == "text":
            assert answer["choices"][1]["prompt_logprobs"] == told
        chunks = stream(client, route, prompt_logprobs=num_top, n=2, temperature=1)
        if route == "chat":
            assert chunks[0]["prompt_logprobs"] == told
            assert sum("prompt_logprobs" in chunk for chunk in chunks) == 1
        else:
            firsts = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in reversed(chunks)}
            assert [firsts[index]["prompt_logprobs"] for index in (0, 1)] == [told] * 2
            assert sum("prompt_logprobs" in chunk["choices"][0] for chunk in chunks) == 2

    @both
    def test_are_the_same_whatever_is_cached(self, client: httpx.Client, route: str) -> None:
        """They are computed from the whole prompt, so that nobody learns from their time what is cached."""
        ask(client, route)
        first, again = (ask(client, route, prompt_logprobs=2) for _ in range(2))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert again["usage"]["prompt_tokens_details"]["cache_miss"]["skipped"] == "prompt_logprobs"
        holders = [first, again] if route == "chat" else [first["choices"][0], again["choices"][0]]
        assert holders[0]["prompt_logprobs"] == holders[1]["prompt_logprobs"]
        assert texts(first) == texts(again) == texts(ask(client, route))

    def test_of_long_prompts_come_in_streams_too(self, client: httpx.Client) -> None:
        prompt = [1 + i % 90 for i in range(1500)]
        (first, *_) = stream(client, "text", prompt=prompt, prompt_logprobs=1, max_tokens=1)
        check_prompt_logprobs(first["choices"][0]["prompt_logprobs"], prompt, 1)

    def test_too_many_of_them_are_refused(self, client: httpx.Client) -> None:
        prompts = [[1 + i % 90 for i in range(1900)]] * 8
        body = {"prompt": prompts, "prompt_logprobs": 20, "n": 16, "max_tokens": 1}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_logprobs"

    def test_beside_echo_each_has_its_own_number(self, client: httpx.Client) -> None:
        asked = {"echo": True, "logprobs": 2, "prompt_logprobs": 4, "max_tokens": 1}
        choice = ask(client, "text", **asked)["choices"][0]
        check_prompt_logprobs(choice["prompt_logprobs"], Tokenizer().encode(PROMPT), 4)
        assert max(len(top) for top in choice["logprobs"]["top_logprobs"][1:]) == 3

    def test_an_echo_with_logprobs_is_streamed(self, client: httpx.Client) -> None:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 6, "n": 2, "seed": 1, "temperature": 1}
        whole = {choice["index"]: choice for choice in ask(client, "text", **asked)["choices"]}
        told: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
        said = {0: "", 1: ""}
        for chunk in stream(client, "text", **asked):
            (choice,) = chunk["choices"]
            said[choice["index"]] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                told[choice["index"]].setdefault(name, []).extend(values)
        assert said == {index: choice["text"] for index, choice in whole.items()}
        assert told == {index: choice["logprobs"] for index, choice in whole.items()}

    @pytest.mark.parametrize("streamed", [False, True])
    def test_scoring_alone_generates_nothing(self, client: httpx.Client, streamed: bool) -> None:
        asked = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
        if streamed:
            *chunks, last = stream(client, "text", stream_options={"include_usage": True}, **asked)
            (choice,) = (chunk["choices"][0] for chunk in chunks)
            usage = last["usage"]
        else:
            answer = ask(client, "text", **asked)
            choice, usage = answer["choices"][0], answer["usage"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
        assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
        assert usage["completion_tokens"] == 0


def test_nothing_of_another_tenants_is_told(server: LiveServer) -> None:
    """The same prompt of two tenants: each computes it, and is told its own."""
    prompt = "a prompt that only these two tenants ever ask, and at length, for several blocks"
    asked: dict[str, Any] = {"prompt": prompt, "return_token_ids": True, "prompt_logprobs": 1}
    with server.http() as client:
        told = []
        for key in ("a", "b"):
            answer = client.post(
                "/v1/completions",
                json=body_of("text", **asked, bad_words=["x"]),
                headers={"Authorization": f"Bearer {key}"},
            ).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            told.append(answer["choices"])
        assert told[0] == told[1]
        assert client.post("/v1/completions", json=body_of("text", **asked)).status_code == 401


def test_responses_take_what_decides_tokens(client: httpx.Client) -> None:
    body: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    answer = client.post("/v1/responses", json={**body, "allowed_token_ids": [50]}).json()
    assert answer["output"][0]["content"][0]["text"] == chr(83) * 8
    refused = client.post("/v1/responses", json={**body, "allowed_token_ids": [VOCAB]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "allowed_token_ids"
