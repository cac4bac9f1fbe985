# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept: turns that build on them, pages, tenants, bounds, and stores that fail."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from live_server import LiveServer, live_server
from openai import OpenAI
from response_prompts import asked_text, last_asked, messages_in
from scripted_engine import ScriptedEngine

from radixkv_server.response_file import SqliteStore
from radixkv_server.response_store import StoreError

URL = "/v1/responses"


def test_a_chain_renders_what_the_turns_before_were(server: LiveServer, ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one", instructions="Be brief.")
    one = last_asked(server)
    second = ada.responses.create(
        model="scripted", input="say:two", instructions="Be brief.", previous_response_id=first.id
    )
    two = last_asked(server)
    ada.responses.create(
        model="scripted", input="say:three", instructions="Be brief.", previous_response_id=second.id
    )
    three = last_asked(server)
    computed = [*one.prompt, *b"one", 257]
    assert two.prompt[: len(computed)] == computed, "what was computed is found again"
    computed = [*two.prompt, *b"two", 257]
    assert three.prompt[: len(computed)] == computed
    assert second.previous_response_id == first.id
    ada.responses.create(model="scripted", input="say:x", previous_response_id=second.id)
    assert not asked_text(last_asked(server)).startswith("<|im_start|>system"), (
        "instructions are not inherited"
    )


def test_retrieving_and_deleting(ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one")
    second = ada.responses.create(model="scripted", input="say:two", previous_response_id=first.id)
    assert ada.responses.retrieve(second.id) == second
    items = ada.responses.input_items.list(second.id, order="asc").data
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "say:one"),
        ("assistant", "one"),
        ("user", "say:two"),
    ]
    assert len({item.id for item in items}) == 3
    ada.responses.delete(first.id)
    for gone in (ada.responses.retrieve, ada.responses.delete, ada.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    third = ada.responses.create(model="scripted", input="say:three", previous_response_id=second.id)
    assert third.output_text == "three", "a deleted turn stays part of the conversations that went on from it"


def test_pages_of_input_items(ada: OpenAI, http: httpx.Client) -> None:
    given = [{"role": "user", "content": f"say:{number}"} for number in range(5)]
    answer = ada.responses.create(model="scripted", input=given)
    listed = list(ada.responses.input_items.list(answer.id, limit=2))
    assert [item.content[0].text for item in listed] == [f"say:{number}" for number in range(4, -1, -1)]
    page = http.get(f"{URL}/{answer.id}/input_items?limit=2").json()
    assert (page["has_more"], page["last_id"]) == (True, page["data"][-1]["id"])
    for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
        assert http.get(f"{URL}/{answer.id}/input_items?{query}").status_code == 400


def test_an_item_reference(server: LiveServer, ada: OpenAI) -> None:
    first = ada.responses.create(model="scripted", input="say:one")
    [said] = first.output
    reference = {"type": "item_reference", "id": said.id}
    ada.responses.create(model="scripted", input=[reference, {"role": "user", "content": "say:x"}])
    assert messages_in(last_asked(server))[0] == "assistant\none<|im_end|>"
    with pytest.raises(openai.NotFoundError) as caught:
        ada.responses.create(model="scripted", input=[{"type": "item_reference", "id": "msg_nothing_0"}])
    assert caught.value.param == "input"


def test_what_is_not_stored_is_not_there(ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:one", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        ada.responses.create(model="scripted", input="say:two", previous_response_id=answer.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_tenants_responses_are_not_there(server: LiveServer, ada: OpenAI) -> None:
    answer = ada.responses.create(model="scripted", input="say:secret")
    with server.openai("key-b") as bob:
        for ask in (
            lambda: bob.responses.retrieve(answer.id),
            lambda: bob.responses.delete(answer.id),
            lambda: bob.responses.input_items.list(answer.id),
            lambda: bob.responses.create(model="scripted", input="x", previous_response_id=answer.id),
            lambda: bob.responses.create(
                model="scripted", input=[{"type": "item_reference", "id": answer.output[0].id}]
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    assert ada.responses.retrieve(answer.id).output_text == "secret"


def test_the_store_is_bounded_and_keeps_what_is_used(server: LiveServer) -> None:
    with (
        live_server(ScriptedEngine(max_model_len=4096), max_stored_responses=2) as small,
        small.openai() as client,
    ):
        ids = []
        for number in range(3):
            ids.append(client.responses.create(model="scripted", input=f"say:{number}").id)
            if number == 1:
                client.responses.retrieve(ids[0])
        assert client.responses.retrieve(ids[0]).output_text == "0"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(ids[1])


def test_a_store_in_a_file_outlives_the_server(tmp_path: Any) -> None:
    path = str(tmp_path / "responses.db")
    with live_server(ScriptedEngine(max_model_len=4096), response_store=path) as one, one.openai() as client:
        answer = client.responses.create(model="scripted", input="say:one")
    with live_server(ScriptedEngine(max_model_len=4096), response_store=path) as two, two.openai() as client:
        assert client.responses.retrieve(answer.id) == answer
        client.responses.create(model="scripted", input="say:two", previous_response_id=answer.id)
        assert messages_in(last_asked(two))[1] == "assistant\none<|im_end|>"


def test_a_locked_store_costs_each_answer_a_bounded_wait_and_nobody_else_anything(tmp_path: Any) -> None:
    path = str(tmp_path / "responses.db")
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=path) as server,
        server.http() as http,
    ):
        kept = http.post(URL, json={"input": "say:one"}).json()
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            bodies = [{"input": "say:two", "stream": number % 2 == 0} for number in range(12)]
            started = time.monotonic()
            http.post(URL, json=bodies[0])
            alone = time.monotonic() - started
            with ThreadPoolExecutor(12) as threads:
                answers = list(threads.map(lambda body: http.post(URL, json=body), bodies))
            together = time.monotonic() - started - alone
            assert together < 8 * alone, "they waited side by side, not one after another"
            assert [answer.status_code for answer in answers] == [200] * 12
            assert answers[1].json()["store"] is False
            assert '"store":false' in answers[0].text.rpartition("event: response.completed")[2]
            assert http.get(f"{URL}/{kept['id']}").json() == kept, "what is stored is read meanwhile"
            refused = http.delete(f"{URL}/{kept['id']}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_busy")
            assert refused.headers["Retry-After"] == "1"
            other.execute("ROLLBACK")
        again = http.post(URL, json={"input": "say:three", "previous_response_id": kept["id"]}).json()
        assert again["store"] is True
        assert http.get(f"{URL}/{again['id']}").json() == again
        assert http.delete(f"{URL}/{kept['id']}").json()["deleted"] is True


async def fill_store(path: Any, number: int) -> None:
    store = SqliteStore(str(path), number, 10**9)
    for i in range(number):
        await store.put("", f"resp_{i}", b"{}" * 1000)
    await store.close()


def test_a_damaged_store_is_an_error_and_serving_goes_on(tmp_path: Any) -> None:
    path = tmp_path / "responses.db"
    asyncio.run(fill_store(path, 100))
    whole = path.read_bytes()
    path.write_bytes(whole[: 3 * 4096] + b"damaged!" * ((len(whole) - 3 * 4096) // 8))
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=str(path)) as server,
        server.http() as http,
    ):
        for ask in (
            lambda: http.get(f"{URL}/resp_7"),
            lambda: http.get(f"{URL}/resp_7/input_items"),
            lambda: http.delete(f"{URL}/resp_7"),
            lambda: http.post(URL, json={"input": "x", "previous_response_id": "resp_7"}),
        ):
            refused = ask()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_failed")
        for stream in (False, True):
            answer = http.post(URL, json={"input": "say:two", "stream": stream})
            assert (answer.status_code, '"store":false' in answer.text) == (200, True)
            assert '"text":"two"' in answer.text
        message = {"max_tokens": 9, "messages": [{"role": "user", "content": "say:hi"}]}
        assert http.post("/v1/messages", json={**message, "thread": {"type": "create"}}).status_code == 200


def test_a_damaged_response_is_an_error(tmp_path: Any) -> None:
    path = tmp_path / "responses.db"
    asyncio.run(fill_store(path, 1))  # no response
    with (
        live_server(ScriptedEngine(max_model_len=4096), response_store=str(path)) as server,
        server.http() as http,
    ):
        refused = http.get(f"{URL}/resp_0")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "response_store_failed")


async def test_a_full_store_is_an_error_and_can_be_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def connect_to_full_disk(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        db.execute("PRAGMA max_page_count = 16")
        return db

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    store = SqliteStore(str(tmp_path / "responses.db"), 100, 10**9)
    await store.put("ada", "one", b"1")
    with pytest.raises(StoreError, match="full") as caught:
        await store.put("ada", "two", b"2" * 10**6)
    assert not caught.value.may_pass
    assert await store.get("ada", "one") == b"1"
    assert await store.get("ada", "two") is None
    await store.close()
