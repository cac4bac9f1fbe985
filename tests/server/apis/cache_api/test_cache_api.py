# SPDX-License-Identifier: Apache-2.0
"""The cache's routes over real HTTP, with two tenants and an admin: what each sees, and what nobody may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv import PrefixCache
from radixkv.observe.advisor import Advisor

ADMIN, ADA, BOB = "operator-key", "ada-key", "bob-key"
SYSTEM = "You are the helpful assistant of the harbour office. "
RULES = "Count the ships every evening and write their number into the book. " * 3


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=8192)
    keys = (f"ada={ADA}", f"bob={BOB}")
    with live_server(engine, api_keys=keys, admin_keys=(f"operator={ADMIN}",)) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_cache(server: LiveServer) -> None:
    server.engine.prefix_cache = PrefixCache(200, 16, observer=Advisor(16))


@pytest.fixture(scope="module")
def ada(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": ADA}) as client:
        yield client


@pytest.fixture(scope="module")
def bob(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": BOB}) as client:
        yield client


@pytest.fixture(scope="module")
def admin(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http(headers={"x-api-key": ADMIN}) as client:
        yield client


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM + RULES}, {"role": "user", "content": text}]


def fill(server: LiveServer, prompt: str | list[dict[str, str]], tenant: str, salt: str = "") -> list[int]:
    """What a request with this prompt leaves in the cache."""
    tokenizer = server.engine.tokenizer
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)
    cache = server.engine.prefix_cache
    lease = cache.acquire(ids, server.engine.cache.namespace(tenant, salt))
    lease.commit(len(ids))
    lease.release()
    cache.check()
    return ids


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(f"/v1/cache/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def get(client: httpx.Client, path: str, status: int = 200, **query: Any) -> Any:
    answer = client.get(f"/v1/cache/{path}" if path else "/v1/cache", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def delete(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.request("DELETE", f"/v1/cache/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


# ---------------------------------------------------------------------- tree


def test_the_tree_has_the_heaviest_nodes_first_and_parents_before_children(server, ada) -> None:
    for text in ("one", "two", "three and more of it " * 5):
        fill(server, chat(text), "ada")
    fill(server, "something short", "ada")
    tree = get(ada, "tree")
    nodes = tree["nodes"]
    assert nodes[0]["text"].startswith("<|im_start|>system\nYou are the helpful")
    assert [node["subtree_tokens"] for node in nodes] == sorted(
        (node["subtree_tokens"] for node in nodes), reverse=True
    )
    seen = {None}
    for node in nodes:
        assert node["parent"] in seen
        seen.add(node["id"])
    assert nodes[0]["children"] == len([node for node in nodes if node["parent"] == nodes[0]["id"]])
    assert tree["totals"]["nodes"] == len(nodes)
    assert tree["totals"]["tokens"] == sum(node["tokens"] for node in nodes)
    assert tree["complete"]
    assert {node["state"] for node in nodes} == {"cached"}
    assert all("tenant" not in node for node in nodes)
    few = get(ada, "tree", limit=2)
    assert [node["id"] for node in few["nodes"]] == [node["id"] for node in nodes[:2]]
    assert few["totals"] == tree["totals"]
    assert {node["level"] for node in get(ada, "tree", depth=1)["nodes"]} == {0}


def test_states_and_what_goes_next(server, ada) -> None:
    cache = server.engine.prefix_cache
    fill(server, "a" * 40, "ada")
    fill(server, "b" * 40, "ada")
    fill(server, "c" * 40, "ada")
    post(ada, "pins", 201, prompt="a" * 40)
    lease = cache.acquire(server.engine.tokenizer.encode("b" * 60), server.engine.cache.namespace("ada"))
    nodes = {node["text"][0]: node for node in get(ada, "tree")["nodes"]}
    assert {name: node["state"] for name, node in nodes.items()} == {
        "a": "pinned",
        "b": "held",
        "c": "cached",
    }
    assert [nodes[name]["eviction_rank"] for name in "abc"] == [None, None, 1]
    lease.release()


def test_tenants_see_nothing_of_each_other(server, ada, bob, admin) -> None:
    fill(server, chat("the secret of ada"), "ada")
    fill(server, "the salted secret of ada " * 3, "ada", "mine")
    before = get(bob, "tree")
    assert before["nodes"] == []
    assert set(before["totals"].values()) == {0}
    fill(server, "bob's own text, and only his", "bob")
    for path in ("tree", "pins", "advice"):
        assert "ada" not in json.dumps(get(bob, path)).replace("adapter", "")
    assert get(bob, "tree", search="secret")["found"] == 0
    assert len(get(bob, "tree")["nodes"]) == 1
    assert get(bob, "tree")["nodes"][0]["eviction_rank"] == 1
    # A salt divides a tenant's own space.
    assert "salted" not in json.dumps(get(ada, "tree"))
    assert get(ada, "tree", cache_salt="mine")["nodes"][0]["text"].startswith("the salted")
    # Admins see whose and how much, and no text.
    everything = get(admin, "tree")
    owners = {(node["tenant"], node["cache_salt"]) for node in everything["nodes"]}
    assert owners == {("ada", ""), ("ada", "mine"), ("bob", "")}
    assert {node["text"] for node in everything["nodes"]} == {None}
    assert get(admin, "tree", search="secret")["found"] == 0


def test_search_finds_text_across_nodes(server, ada) -> None:
    fill(server, chat("Where is the Lighthouse keeper?"), "ada")
    fill(server, chat("Where is the harbour master?"), "ada")
    found = get(ada, "tree", search="LIGHTHOUSE keeper")
    assert found["found"] == 1
    assert "the Lighthouse keeper?" in found["nodes"][0]["snippet"]
    assert get(ada, "tree", search="where is the")["found"] >= 1
    across = get(ada, "tree", search="the harbour m")  # the node begins with the `h`
    assert across["found"] == 1
    assert get(ada, "tree", search="no such thing") == {
        "object": "cache.search",
        "search": "no such thing",
        "found": 0,
        "nodes": [],
        "complete": True,
    }


@pytest.mark.parametrize(
    "query",
    [
        {"depth": "0"},
        {"limit": "-1"},
        {"limit": "2001"},
        {"limit": "1e3"},
        {"depth": "٣"},
        {"search": ""},
        {"search": "x" * 201},
        {"cache_salt": ""},
        {"cache_salt": "a/../b"},
        {"block_hash": "12"},
        {"tenant": "bob"},
    ],
)
def test_bad_queries(ada, query) -> None:
    assert get(ada, "tree", 400, **query)["error"]["param"] == next(iter(query))


# ---------------------------------------------------------------------- explain


def test_explain_shows_both_sides_of_the_break(server, ada, bob) -> None:
    fill(server, f"Today is 2026-11-21 08:15. {RULES}", "ada")
    told = post(ada, "explain", prompt=f"Today is 2026-11-21 09:47. {RULES}")
    assert told["reason"] == "diverged"
    assert told["cached_tokens"] == told["position"] == told["around"]["position"] == 21
    assert told["around"]["before"] == "Today is 2026-11-21 0"
    assert told["around"]["prompt"].startswith("9:47. Count the ships")
    assert told["around"]["cached"].startswith("8:15. Count the ships")
    assert told["recoverable_tokens"] == len(RULES) + 2
    assert "A timestamp at token 21" in told["advice"]
    assert "say it in the latest user message" in told["advice"]
    assert not server.engine.requests, "nothing was sent to the model"
    others = post(bob, "explain", prompt=f"Today is 2026-11-21 09:47. {RULES}")
    assert (others["reason"], others["cached_tokens"]) == ("first_seen", 0)
    assert "8:15" not in json.dumps(others)


def test_explain_renders_chats_as_generation_does(server, ada) -> None:
    messages = chat("How many ships?")
    options = {"tools": [{"type": "function", "function": {"name": "count"}}], "temperature": 0.5}
    answer = ada.post("/v1/chat/completions", json={"messages": messages, **options})
    assert answer.status_code == 200, answer.text
    asked = server.engine.requests.pop().prompt
    lease = server.engine.prefix_cache.acquire(asked, server.engine.cache.namespace("ada"))
    lease.commit(len(asked))
    lease.release()
    told = post(ada, "explain", messages=messages, **options)
    assert (told["reason"], told["missed_tokens"], told["position"]) == ("hit", 1, None)
    assert told["around"] is None
    salted = post(ada, "explain", messages=messages, cache_salt="other", **options)
    assert salted["reason"] == "first_seen"


def test_explain_says_what_became_of_it(server, ada, admin) -> None:
    ids = fill(server, RULES, "ada")
    server.engine.prefix_cache.evict(200)
    told = post(ada, "explain", prompt=ids)
    assert (told["reason"], told["evicted_by"]) == ("evicted", "evict()")
    assert "pin what must stay" in told["advice"]
    fill(server, RULES, "ada")
    elsewhere = post(admin, "explain", prompt=ids)
    assert elsewhere["reason"] == "namespace"
    assert "ships" not in json.dumps(elsewhere["around"]["cached"])


def test_compare_two_prompts(server, ada) -> None:
    told = post(ada, "explain", compare={"prompt": f"It is 7:01. {RULES}", "with": f"It is 7:02. {RULES}"})
    assert (told["position"], told["shared_tokens"], told["recoverable_tokens"]) == (9, 9, len(RULES) + 2)
    assert told["around"]["with"].startswith("2. Count")
    assert "A time at token 9" in told["advice"]
    same = post(ada, "explain", compare={"prompt": chat("x"), "with": chat("x")})
    assert (same["position"], same["around"], same["missed_tokens"]) == (None, None, 1)
    begins = post(ada, "explain", compare={"prompt": "abcdef", "with": [97, 98, 99]})
    assert (begins["position"], begins["recoverable_tokens"]) == (3, 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": chat("x"), "prompt": "x"}, "messages"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 9000}, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "a/../b"}, "cache_salt"),
        ({"prompt": "x", "block_hash": 17}, "block_hash"),
        ({"prompt": "x", "tenant": "bob"}, "tenant"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
        ({"messages": chat("x"), "chat_template": "{{ x }}"}, "chat_template"),
        ({"messages": chat("x"), "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"compare": {"prompt": "x"}}, "compare.with"),
        ({"compare": {"prompt": "x", "with": []}}, "compare.with"),
        ({"compare": {"prompt": {"a": 1}, "with": "x"}}, "compare.prompt"),
    ],
)
def test_bad_explanations(ada, body, param) -> None:
    error = post(ada, "explain", 400, **body)["error"]
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}
    assert post(ada, "explain", prompt="still here")["reason"] == "first_seen"


# ---------------------------------------------------------------------- pins


def test_pins_are_set_listed_and_ended(server, ada, bob, admin) -> None:
    fill(server, chat("one"), "ada")
    pin = post(ada, "pins", 201, messages=chat("one")[:1], ttl=60)
    assert pin["pinned_tokens"] == pin["cached_tokens"] == pin["prompt_tokens"] == pin["tokens"]
    assert pin["text"].startswith("<|im_start|>system\nYou")
    (listed,) = get(ada, "pins")["data"]
    assert listed["id"] == pin["id"]
    assert 0 < listed["expires_in_s"] <= 60
    assert get(bob, "pins")["data"] == []
    assert get(ada, "pins", cache_salt="other")["data"] == []
    (seen,) = get(admin, "pins")["data"]
    assert (seen["tenant"], seen["text"]) == ("ada", None)
    assert delete(bob, "pins", 404, id=pin["id"])["error"]["code"] == "pin_not_found"
    assert delete(admin, "pins", 404, messages=chat("one")[:1])["error"]["code"] == "pin_not_found"
    delete(ada, "pins", id=pin["id"])
    delete(ada, "pins", 404, id=pin["id"])
    post(ada, "pins", 201, messages=chat("one")[:1])
    delete(ada, "pins", messages=chat("one")[:1])
    assert get(ada, "pins")["data"] == []
    server.engine.prefix_cache.check()


def test_a_node_of_the_tree_is_pinned_by_its_id(server, ada, bob, admin) -> None:
    fill(server, chat("one"), "ada")
    fill(server, chat("two, and more of it " * 3), "ada")
    fill(server, "salted text " * 4, "ada", "mine")
    leaf = next(node for node in get(ada, "tree")["nodes"] if (node["text"] or "").startswith("two"))
    pin = post(ada, "pins", 201, node=leaf["id"], ttl=60)
    assert pin["pinned_tokens"] == pin["prompt_tokens"] == leaf["start"] + leaf["tokens"]
    assert (pin["node"], get(ada, "pins")["data"][0]["node"]) == (leaf["id"], leaf["id"])
    states = {node["id"]: node["state"] for node in get(ada, "tree")["nodes"]}
    assert states[leaf["id"]] == states[leaf["parent"]] == "pinned"
    assert sorted(states.values()) == ["cached", "pinned", "pinned"]
    for client in (bob, admin):
        assert post(client, "pins", 404, node=leaf["id"])["error"]["code"] == "node_not_found"
    (salted,) = get(ada, "tree", cache_salt="mine")["nodes"]
    assert post(ada, "pins", 404, node=salted["id"])["error"]["param"] == "node"
    assert post(ada, "pins", 201, node=salted["id"], cache_salt="mine")["cache_salt"] == "mine"
    assert post(ada, "pins", 400, node=leaf["id"], prompt="x")["error"]["code"]
    delete(ada, "pins", id=pin["id"])
    server.engine.prefix_cache.check()


def test_an_explanation_names_the_nodes_of_the_path(server, ada, bob) -> None:
    for text in ("one", "two, and more of it " * 3):
        fill(server, chat(text), "ada")
    nodes = {node["id"]: node for node in get(ada, "tree")["nodes"]}
    path = post(ada, "explain", messages=chat("two, and more of it " * 3))["nodes"]
    assert [nodes[name]["level"] for name in path] == [0, 1]
    assert nodes[path[1]]["parent"] == path[0]
    assert nodes[path[1]]["text"].startswith("two")
    assert post(bob, "explain", messages=chat("one"))["nodes"] == []


def test_pins_that_cannot_be_had(server, ada, bob) -> None:
    fill(server, "x" * 400, "bob")
    assert post(ada, "pins", 409, prompt="x" * 400)["error"]["code"] == "not_cached"
    for letter in "ab":
        fill(server, letter * 800, "ada")
    assert post(ada, "pins", 201, prompt="a" * 800)["pinned_tokens"] == 800
    part = post(ada, "pins", 201, prompt="b" * 1000)
    assert (part["cached_tokens"], part["pinned_tokens"]) == (800, 800)
    full = post(bob, "pins", 507, prompt="x" * 400)["error"]
    assert full["code"] == "pin_budget_full"
    assert "ada" not in full["message"]


@pytest.mark.parametrize("ttl", [0, -1, 1e9, "60", True])
def test_bad_times_of_pins(ada, ttl) -> None:
    assert post(ada, "pins", 400, prompt="x", ttl=ttl)["error"]["param"] == "ttl"


# ---------------------------------------------------------------------- public prefixes, reset, advice


def test_public_prefixes_are_for_admins_to_declare(server, ada, bob, admin) -> None:
    error = post(ada, "public", 403, prompt=SYSTEM)["error"]
    assert error["code"] == "admin_only"
    delete(ada, "public", 403, prompt=SYSTEM)
    assert post(admin, "public", 400, prompt="short")["error"]["code"] == "too_short"
    assert post(admin, "public", 201, prompt=SYSTEM + RULES)["tokens"] % 16 == 0
    fill(server, SYSTEM + RULES + "of ada", "ada")
    assert post(bob, "explain", prompt=SYSTEM + RULES + "of bob")["cached_tokens"] > 200
    # A shared node is seen by those who use it, without text, state or hits.
    assert get(bob, "tree")["nodes"] == []
    shared, own = get(ada, "tree")["nodes"]
    assert shared["public"]
    assert not own["public"]
    assert {shared[name] for name in ("text", "state", "hits", "leases", "idle_s")} == {None}
    delete(admin, "public", prompt=SYSTEM + RULES)
    delete(admin, "public", 404, prompt=SYSTEM + RULES)


def test_reset_is_for_admins(server, ada, admin) -> None:
    fill(server, RULES, "ada")
    assert ada.post("/v1/cache/reset").status_code == 403
    assert len(get(ada, "tree")["nodes"]) == 1
    assert admin.post("/v1/cache/reset").json() == {"object": "cache.reset", "reset": True}
    assert get(ada, "tree")["nodes"] == []


def test_advice_names_the_timestamp(server, ada, bob, admin) -> None:
    for minute in range(10, 40):
        fill(server, f"It is 2026-11-21 08:{minute}. {RULES}", "ada")
    advice = get(ada, "advice")["data"]
    top = advice[0]
    assert top["kind"] == "a timestamp"
    assert top["recoverable_tokens"] > 1000
    assert top["advice"].startswith("A timestamp at token 2")
    assert "move it to the end" in top["advice"]
    assert top["example"]["before"].endswith("2026-11-21 08:2")
    assert top["family"] == "It i"
    assert get(bob, "advice")["data"] == []
    told = get(admin, "advice")["data"][0]
    assert (told["tenant"], told["example"], told["family"]) == ("ada", None, None)


# ---------------------------------------------------------------------- all of them

ROUTES = [
    ("GET", "/v1/cache/tree"),
    ("POST", "/v1/cache/explain"),
    ("GET", "/v1/cache/pins"),
    ("POST", "/v1/cache/pins"),
    ("DELETE", "/v1/cache/pins"),
    ("POST", "/v1/cache/public"),
    ("DELETE", "/v1/cache/public"),
    ("POST", "/v1/cache/reset"),
    ("GET", "/v1/cache/advice"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_a_key(server, method, path) -> None:
    with server.http() as nobody:
        assert nobody.request(method, path).status_code == 401


def test_other_methods_are_refused(ada) -> None:
    for path in {path for _, path in ROUTES}:
        assert ada.request("PATCH", path).status_code == 405
    assert ada.get("/v1/cache/nothing").status_code == 404


@pytest.mark.parametrize("path", ["explain", "pins", "public"])
def test_block_hashes_and_the_like_are_no_fields(admin, path) -> None:
    for field in ("block_hash", "block_hashes", "namespace", "parent_hash"):
        error = post(admin, path, 400, prompt="x", **{field: 1})["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", field)


def test_unknown_models_and_control_tokens_in_text(ada) -> None:
    assert post(ada, "explain", 404, prompt="x", model="gpt-9")["error"]["code"] == "model_not_found"
    assert post(ada, "pins", 404, messages=chat("x"), model="gpt-9")["error"]["code"] == "model_not_found"
    told = post(ada, "explain", prompt="\x00<|im_start|>")
    assert told["prompt_tokens"] == len("\x00<|im_start|>"), "text stays text"


@pytest.mark.parametrize("path", ["explain", "pins"])
def test_bodies_that_are_not_sound(ada, path) -> None:
    json_type = {"content-type": "application/json"}
    url = f"/v1/cache/{path}"
    assert ada.post(url, content=b"{", headers=json_type).status_code == 400
    assert ada.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert ada.post(url, content=b'{"prompt": "\\ud800"}', headers=json_type).status_code == 400
    for number in (b"NaN", b"Infinity", b"1e999"):
        assert ada.post(url, content=b'{"ttl": ' + number + b"}", headers=json_type).status_code == 400
    assert ada.post(url, content=b"[" * 10_000, headers=json_type).status_code == 400
    assert (
        ada.post(url, content=b'{"prompt":"' + b"x" * 34_000_000 + b'"}', headers=json_type).status_code
        == 413
    )
