# SPDX-License-Identifier: Apache-2.0
"""The Conversations API as OpenAI's SDK speaks it, and responses that go on in a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from response_prompts import last_asked, messages_in
from scripted_engine import ScriptedEngine

URL = "/v1/conversations"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=4096, caches=True, num_blocks=1000)
    with live_server(engine, api_keys=("ada=key-a", "bob=key-b")) as running:
        yield running


def said(text: str, role: str = "user", **fields: Any) -> Any:
    return {"type": "message", "role": role, "content": text, **fields}


def texts(client: OpenAI, conversation_id: str) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(conversation_id, order="asc")]


def test_a_conversation_from_its_beginning_to_its_end(ada: OpenAI) -> None:
    conversation = ada.conversations.create(items=[said("one", "system")], metadata={"topic": "x"})
    assert (conversation.object, conversation.metadata) == ("conversation", {"topic": "x"})
    assert ada.conversations.retrieve(conversation.id) == conversation
    assert ada.conversations.update(conversation.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert ada.conversations.update(conversation.id, metadata=None).metadata == {}
    added = ada.conversations.items.create(conversation.id, items=[said("two"), said("three", id="msg_own")])
    assert (len(added.data), added.last_id, added.has_more) == (2, "msg_own", False)
    assert texts(ada, conversation.id) == ["one", "two", "three"]
    item = ada.conversations.items.retrieve("msg_own", conversation_id=conversation.id)
    assert (item.role, item.content[0].type) == ("user", "input_text")
    left = ada.conversations.items.delete(added.first_id, conversation_id=conversation.id)
    assert left.id == conversation.id
    assert texts(ada, conversation.id) == ["one", "three"]
    ada.conversations.items.create(conversation.id, items=[said("four")])
    assert len({item.id for item in ada.conversations.items.list(conversation.id)}) == 3
    deleted = ada.conversations.delete(conversation.id)
    assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
    for gone in (
        lambda: ada.conversations.retrieve(conversation.id),
        lambda: ada.conversations.update(conversation.id, metadata={}),
        lambda: ada.conversations.delete(conversation.id),
        lambda: ada.conversations.items.list(conversation.id),
        lambda: ada.conversations.items.create(conversation.id, items=[said("x")]),
        lambda: ada.conversations.items.retrieve("msg_own", conversation_id=conversation.id),
        lambda: ada.responses.create(model="scripted", input="x", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()


def test_pages_of_items(ada: OpenAI, http: httpx.Client) -> None:
    conversation = ada.conversations.create(items=[said(str(number)) for number in range(5)])
    listed = list(ada.conversations.items.list(conversation.id, limit=2))
    assert [item.content[0].text for item in listed] == ["4", "3", "2", "1", "0"]
    empty = ada.conversations.create()
    assert list(ada.conversations.items.list(empty.id)) == []
    for query in ("limit=0", "order=up", "after=nothing", "include=everything"):
        assert http.get(f"{URL}/{conversation.id}/items?{query}").status_code == 400


def test_a_next_turn_hits_the_prefix_of_the_one_before(ada: OpenAI, server: LiveServer) -> None:
    conversation = ada.conversations.create(items=[said("Be brief. " * 20, "developer")])
    first = ada.responses.create(model="scripted", input="say:one", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    with ada.responses.stream(
        model="scripted", input="say:two", conversation={"id": conversation.id}
    ) as events:
        second = events.get_final_response()
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens - 1, "the whole prompt of the turn before"
    assert messages_in(last_asked(server))[1:4] == [
        "user\nsay:one<|im_end|>",
        "assistant\none<|im_end|>",
        "user\nsay:two<|im_end|>",
    ]
    assert texts(ada, conversation.id)[1:] == ["say:one", "one", "say:two", "two"]
    counted = ada.responses.input_tokens.count(input="say:x", conversation=conversation.id)
    ada.responses.create(model="scripted", input="say:x", conversation=conversation.id, store=False)
    assert counted.input_tokens == len(last_asked(server).prompt)
    assert texts(ada, conversation.id)[-1] == "x", "what is not stored by itself belongs to the conversation"


def test_items_may_be_referred_to(ada: OpenAI, server: LiveServer) -> None:
    conversation = ada.conversations.create(items=[said("say:remembered")])
    [item] = ada.conversations.items.list(conversation.id)
    ada.responses.create(model="scripted", input=[{"type": "item_reference", "id": item.id}])
    assert messages_in(last_asked(server))[0] == "user\nsay:remembered<|im_end|>"
    other = ada.conversations.create(items=[{"type": "item_reference", "id": item.id}])
    assert texts(ada, other.id) == ["say:remembered"]


def test_turns_in_the_background_belong_to_it_and_failed_ones_do_not(ada: OpenAI) -> None:
    conversation = ada.conversations.create()
    begun = ada.responses.create(
        model="scripted", input="say:later", conversation=conversation.id, background=True
    )
    list(ada.responses.retrieve(begun.id, stream=True))
    assert texts(ada, conversation.id) == ["say:later", "later"]
    with pytest.raises(openai.BadRequestError):
        ada.responses.create(model="scripted", input="x" * 5000, conversation=conversation.id)
    assert texts(ada, conversation.id) == ["say:later", "later"]


def test_turns_that_end_at_once_are_all_kept(ada: OpenAI) -> None:
    conversation = ada.conversations.create()

    def turn(number: int) -> None:
        ada.responses.create(model="scripted", input=f"say:{number}", conversation=conversation.id)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(turn, range(16)))
    kept = texts(ada, conversation.id)
    assert sorted(kept[1::2], key=int) == [str(number) for number in range(16)]
    assert kept[::2] == [f"say:{answer}" for answer in kept[1::2]], "each answer follows its question"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [said("x")] * 21}, "items"),
        ("", {"items": [said("x", id="a"), said("y", id="a")]}, "items[1].id"),
        ("", {"metadata": {"k": 5}}, "metadata.k"),
        ("", {"name": "x"}, "name"),
        ("/{id}", {}, "metadata"),
        ("/{id}/items", {"items": []}, "items"),
        ("/{id}/items", {"items": [said("x", id="msg_first")]}, "items[0].id"),
        ("/{id}/items", {"items": [{"type": "item_reference", "id": "msg_x_0"}]}, "input"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, body: Any, param: str) -> None:
    first = http.post(URL, json={"items": [said("x", id="msg_first")]}).json()
    answer = http.post(URL + path.format(id=first["id"]), json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_x"}, "conversation"),
        ({"conversation": 5}, "conversation"),
        ({"input": [said("x", id="msg_first")]}, "input[0].id"),
    ],
)
def test_refusals_of_turns(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    first = http.post(URL, json={"items": [said("x", id="msg_first")]}).json()
    answer = http.post("/v1/responses", json={"input": "x", "conversation": first["id"], **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_tenants_conversations_are_not_there(server: LiveServer, ada: OpenAI) -> None:
    conversation = ada.conversations.create(items=[said("secret", id="msg_secret")])
    with server.openai("key-b") as bob:
        for ask in (
            lambda: bob.conversations.retrieve(conversation.id),
            lambda: bob.conversations.update(conversation.id, metadata={}),
            lambda: bob.conversations.delete(conversation.id),
            lambda: bob.conversations.items.list(conversation.id),
            lambda: bob.conversations.items.create(conversation.id, items=[said("x")]),
            lambda: bob.conversations.items.retrieve("msg_secret", conversation_id=conversation.id),
            lambda: bob.responses.create(model="scripted", input="x", conversation=conversation.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    assert texts(ada, conversation.id) == ["secret"]


def test_a_conversation_in_a_file_outlives_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    with live_server(ScriptedEngine(), response_store=path) as one, one.openai() as client:
        conversation = client.conversations.create(items=[said("say:one")], metadata={"a": "b"})
        client.responses.create(model="scripted", input="say:two", conversation=conversation.id)
    with live_server(ScriptedEngine(), response_store=path) as two, two.openai() as client:
        assert client.conversations.retrieve(conversation.id) == conversation
        client.responses.create(model="scripted", input="say:three", conversation=conversation.id)
        assert texts(client, conversation.id) == ["say:one", "say:two", "two", "say:three", "three"]


@pytest.mark.parametrize("in_file", [False, True])
def test_a_conversation_that_grows_too_large_stays_as_it_was(tmp_path: Path, in_file: bool) -> None:
    path = str(tmp_path / "responses.db") if in_file else None
    with (
        live_server(ScriptedEngine(), response_store=path, max_stored_bytes=2000) as small,
        small.openai() as client,
    ):
        conversation = client.conversations.create(items=[said("kept")])
        with pytest.raises(openai.InternalServerError, match="max_stored_bytes"):
            client.conversations.items.create(conversation.id, items=[said("x" * 2000)])
        assert texts(client, conversation.id) == ["kept"]
