# SPDX-License-Identifier: Apache-2.0
"""Hit rates, the latest requests and the events of the cache over HTTP, with two tenants and an admin."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine

from radixkv import PrefixCache
from radixkv.cache.reporting.explain import MissReport
from radixkv.cache.reporting.reasons import Reason
from radixkv.engine.input_processor import PromptLimits
from radixkv.engine.outputs import OutputDelta, PromptOutcome, RequestOutput
from radixkv.errors import RequestFailedError
from radixkv.sampling.sampling_params import SamplingParams
from radixkv.scheduling.request import Request, RequestTimes
from radixkv_server.activity.activity import Activity, SeenRequest
from radixkv_server.activity.cache_feed import CacheFeed
from radixkv_server.activity.hit_windows import HitCounts
from radixkv_server.generation.progress import PromptProgress
from radixkv_server.http.request_record import RequestRecord
from radixkv_server.tenants.tenant import Tenant

KEYS = {"ada": "ada-key", "bob": "bob-key", "operator": "operator-key"}


@pytest.fixture
def server() -> Iterator[LiveServer]:
    engine = ScriptedEngine(max_model_len=2048)
    keys = tuple(f"{name}={KEYS[name]}" for name in ("ada", "bob"))
    with live_server(engine, api_keys=keys, admin_keys=("operator=operator-key",)) as running:
        yield running


def client_of(server: LiveServer, name: str) -> httpx.Client:
    return server.http(headers={"x-api-key": KEYS[name]})


def ask(server: LiveServer, name: str, text: str, **more: Any) -> httpx.Response:
    with client_of(server, name) as client:
        return client.post("/v1/completions", json={"prompt": text, **more})


def get(server: LiveServer, name: str, path: str = "", **query: Any) -> Any:
    with client_of(server, name) as client:
        answer = client.get(f"/v1/cache{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


def fill(server: LiveServer, text: str, tenant: str, salt: str = "") -> None:
    cache = server.engine.prefix_cache
    lease = cache.acquire(server.engine.tokenizer.encode(text), server.engine.cache.namespace(tenant, salt))
    lease.commit(lease.num_tokens)
    lease.release()


# ---------------------------------------------------------------------- GET /v1/cache


def test_figures_of_ones_own(server: LiveServer) -> None:
    # The scripted engine says that half of each prompt was cached.
    assert ask(server, "ada", "say:hello there").status_code == 200
    assert ask(server, "ada", "say:hello", stream=True).status_code == 200
    assert ask(server, "bob", "say:ho").status_code == 200
    fill(server, "x" * 40, "ada")
    mine = get(server, "ada")
    for name in ("1m", "5m", "1h", "total"):
        assert mine["windows"][name] == {
            "requests": 2,
            "hit_requests": 0,
            "request_hit_rate": 0.0,
            "prompt_tokens": 24,
            "cached_tokens": 11,
            "token_hit_rate": round(11 / 24, 4),
        }
    assert mine["role"] == "user"
    assert mine["pool"] == {"cached_blocks": 3, "held_blocks": 0, "pinned_blocks": 0, "complete": True}
    assert mine["quota"] is None
    assert not {"tenants", "counters", "eviction_policy"} & set(mine)
    everything = get(server, "operator")
    assert everything["windows"]["total"]["requests"] == 3
    assert everything["pool"]["total_blocks"] == sum(
        everything["pool"][f"{state}_blocks"] for state in ("free", "cached", "held")
    )
    assert [each["tenant"] for each in everything["tenants"]] == ["ada", "bob"]
    assert everything["tenants"][1]["windows"]["1m"]["prompt_tokens"] == 6
    assert everything["counters"]["evicted_blocks"] == 5


def test_windows_forget_and_sums_do_not() -> None:
    now = [1000.0]
    activity = Activity(clock=lambda: now[0])
    report = MissReport(Reason.EVICTED, 100, 60, age_s=1.0, evicted_by="capacity")
    outcome = PromptOutcome(100, 60, 40, None, report)
    one, request = begin(activity, PromptProgress(100, outcome=outcome))
    for _ in range(3):
        activity.admitted(one, request)
        now[0] += 100
    windows = activity.windows("ada")
    assert [windows[name].requests for name in ("1m", "5m", "1h", "total")] == [0, 2, 3, 3]
    assert windows["5m"] == HitCounts(2, 2, 200, 120)
    assert activity.missed("ada") == {"evicted": 120}
    assert (
        activity.history("ada")
        == activity.history(None)
        == [(290, HitCounts(1, 1, 100, 60)), (190, HitCounts(1, 1, 100, 60)), (90, HitCounts(1, 1, 100, 60))]
    )
    assert activity.windows("bob")["total"] == HitCounts()
    now[0] += 4000
    activity.admitted(one, request)
    assert activity.windows(None)["1h"].requests == 1
    assert len(activity.history(None)) == 1


# ---------------------------------------------------------------------- requests


def test_the_latest_requests(server: LiveServer) -> None:
    ids = [ask(server, "ada", f"say:{word}").json()["id"] for word in ("one", "two")]
    assert ask(server, "ada", ["say:a", "say:b"], cache_salt="mine").status_code == 200
    ask(server, "bob", "say:the secret of bob")
    requests = get(server, "ada", "/requests")["data"]
    assert [one["id"] for one in requests[2:]] == ids[::-1]
    assert requests[0]["id"].endswith(("-0", "-1"))
    assert [one["text"] for one in requests] == [None, None, "say:two", "say:one"]  # the salt is another part
    assert {one["text"] for one in get(server, "ada", "/requests", cache_salt="mine")["data"]} == {
        "say:a",
        "say:b",
        None,
    }
    last = requests[-1]
    assert (last["state"], last["prompt_tokens"], last["cached_tokens"]) == ("finished", 7, 3)
    assert last["completion_tokens"] == 4
    assert 0 <= last["ttft_s"] <= last["duration_s"]
    assert "bob" not in json.dumps(requests)
    everything = get(server, "operator", "/requests")["data"]
    assert len(everything) == 5
    assert {(one["tenant"], one["text"]) for one in everything} == {("ada", None), ("bob", None)}
    assert len(get(server, "ada", "/requests", limit=1)["data"]) == 1


def test_one_request_is_explained_to_its_tenant_only(server: LiveServer) -> None:
    name = ask(server, "ada", "say:hello").json()["id"]
    told = get(server, "ada", f"/requests/{name}")
    assert told["object"] == "cache.request"
    assert told["text"] == "say:hello"
    assert told["explanation"] is None  # the scripted engine does not say
    with client_of(server, "bob") as bob:
        answer = bob.get(f"/v1/cache/requests/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "request_not_found"


def test_explanations_show_the_own_text_around_the_miss() -> None:
    with live_server(ScriptedEngine(caches=True)) as open_server, open_server.http() as client:
        for minute in "21":
            body = {"prompt": f"It is 7:0{minute}. Count the ships"}
            assert client.post("/v1/completions", json=body).status_code == 200
        one = client.get("/v1/cache/requests").json()["data"][0]
        assert one["reason"] == "diverged"
        told = client.get(f"/v1/cache/requests/{one['id']}").json()["explanation"]
        around = {
            "position": 9,
            "before": "It is 7:0",
            "prompt": "1. Count the ships",
            "cached": "2. Count the ships",
        }
        assert told["around"] == around
        assert told["advice"].startswith("A time at token 9")
        assert client.get("/v1/cache").json()["missed_tokens"] == {"first_seen": 27, "diverged": 18}


def test_explanations_show_nothing_of_what_others_made_public() -> None:
    engine = ScriptedEngine(caches=True)
    with live_server(engine, api_keys=("ada=ada-key",), admin_keys=("operator=operator-key",)) as server:
        with client_of(server, "operator") as operator:
            rules = "The rules of this house, for all"
            for prompt in (rules, f"{rules}: {'the word of the day is swordfish. ' * 2}"):
                assert operator.post("/v1/cache/public", json={"prompt": prompt}).status_code == 201
                assert operator.post("/v1/completions", json={"prompt": prompt}).status_code == 200
        name = ask(server, "ada", f"{rules}: the word of the day is unknown to me.").json()["id"]
        told = get(server, "ada", f"/requests/{name}")["explanation"]
        assert (told["reason"], told["around"]["cached"]) == ("diverged", None)
        assert "swordfish" not in json.dumps(told)


def test_how_requests_end(server: LiveServer) -> None:
    engine = server.engine
    engine.fail = lambda asked, given: RequestFailedError("no") if "fail" in asked.text else None
    assert ask(server, "ada", "say:fail").status_code == 500
    assert ask(server, "ada", "say:fail", stream=True).status_code in (200, 500)
    engine.gate.clear()
    engine.hold_at = 2
    with client_of(server, "ada") as client:
        with client.stream("POST", "/v1/completions", json={"prompt": "say:wait", "stream": True}) as answer:
            lines = answer.iter_lines()  # its end would be the stream's
            next(lines)
            running = get(server, "ada", "/requests")["data"][0]
            assert (running["state"], running["cached_tokens"]) == ("running", 4)
            assert get(server, "ada")["running_requests"] == 1
        engine.wait_until(lambda: engine.requests[-1].aborted)
    engine.release()
    while get(server, "ada")["running_requests"]:  # the engine hears of an end before its record is closed
        pass
    states = [one["state"] for one in get(server, "ada", "/requests")["data"]]
    assert states == ["aborted", "failed", "failed"]
    assert get(server, "ada")["running_requests"] == 0


def test_the_ring_is_bounded(server: LiveServer) -> None:
    for _ in range(2):
        assert ask(server, "ada", ["say:x"] * 150).status_code == 200
    assert len(get(server, "ada", "/requests")["data"]) == 200
    assert get(server, "ada")["windows"]["total"]["requests"] == 300


LIMITS = PromptLimits(4096, 4096, block_size=16, vocab_size=None)


def begin(activity: Activity, progress: PromptProgress) -> tuple[SeenRequest, Request]:
    """Begin a request with one prompt."""
    asked = Request(LIMITS.encode(range(progress.num_tokens)), SamplingParams())
    record = RequestRecord("x", caller=Tenant("ada"))
    (one,) = activity.begin(record, "x", [asked], None, [progress])
    return one, asked


@pytest.mark.parametrize(
    ("later", "rate"), [([], None), ([(9, 2.0)], None), ([(1, 1.5), (2, 2.0)], None), ([(4, 2), (4, 3)], 4.0)]
)
def test_a_rate_needs_some_tokens_in_some_steps(later: list[tuple[int, float]], rate: float | None) -> None:
    one = PromptProgress(4)
    for count, at in [(1, 1.0), *later]:
        one.take_delta(OutputDelta("x", 0, "", [7] * count), at)
    assert one.tokens_per_s == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(("guessed", "has_rate"), [(0, True), (5, True), (7, False)])
def test_guesses_that_came_in_one_step_give_no_rate(guessed: int, has_rate: bool) -> None:
    output = RequestOutput("x", None, [], [], num_generated_tokens=8, accepted_draft_tokens=guessed)
    output.times = RequestTimes(0.0, 1.0, 2.0)
    one = PromptProgress(4)
    one.take_output(output, 50.0)
    assert (one.tokens_per_s is not None) == has_rate
    assert one.first_token_at == 49.0, "by this clock, whatever the engine's says"


def test_prompts_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv_server.activity.activity.KEPT_PROMPT_TOKENS", 10)
    activity = Activity()
    kept = []
    for _ in range(4):
        activity.admitted(*begin(activity, PromptProgress(4)))
        kept.append(activity.latest(None, 10))
    assert sorted(len(one.prompt) for one in kept[-1]) == [0, 0, 4, 4]


# ---------------------------------------------------------------------- streams


class Events:
    """Reads server-sent events one by one."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._lines = answer.iter_lines()

    def next(self) -> tuple[str, str | None, Any]:
        """(event, id, data); pings are skipped."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if not line and "data" in fields:
                return fields.get("event", ""), fields.get("id"), json.loads(fields["data"])
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
        raise AssertionError("the stream has ended")


def test_requests_as_a_stream(server: LiveServer) -> None:
    ask(server, "ada", "say:before")
    with client_of(server, "ada") as client:
        accept = {"accept": "text/event-stream"}
        with client.stream("GET", "/v1/cache/requests", headers=accept) as answer:
            events = Events(answer)
            event, _, data = events.next()
            assert (event, [one["text"] for one in data["requests"]]) == ("snapshot", ["say:before"])
            ask(server, "bob", "say:not for ada")
            ask(server, "ada", "say:after")
            event, _, data = events.next()
            assert (event, data["requests"][0]["text"]) == ("requests", "say:after")


def test_events_begin_with_a_snapshot_and_go_on_where_they_stopped(server: LiveServer) -> None:
    fill(server, "a" * 32, "ada")
    with client_of(server, "ada") as client:
        with client.stream("GET", "/v1/cache/events") as answer:
            events = Events(answer)
            event, first_id, tree = events.next()
            assert event == "snapshot"
            (node,) = tree["nodes"]
            fill(server, "b" * 32, "bob")
            fill(server, "c" * 32, "ada", "salt")
            fill(server, "a" * 48, "ada")
            event, last_id, data = events.next()
            assert event == "changes"
            assert [(one["type"], one["tokens"]) for one in data["changes"]] == [("stored", 16)]
            assert first_id.endswith("-0")
            assert last_id.endswith("-1"), "others' changes are not counted"
        resume = {"last-event-id": last_id}
        fill(server, "d" * 16, "ada")
        with client.stream("GET", "/v1/cache/events", headers=resume) as answer:
            event, _, data = Events(answer).next()
            assert (event, len(data["changes"])) == ("changes", 1)
        for unknown in ("0123456789ab-3", "nonsense", last_id.replace("-1", "-99")):
            with client.stream("GET", "/v1/cache/events", headers={"last-event-id": unknown}) as answer:
                assert Events(answer).next()[0] == "snapshot"
        server.engine.prefix_cache.reset()
        with client.stream("GET", "/v1/cache/events", headers=resume) as answer:
            events, kinds = Events(answer), []
            while len(kinds) < 5:  # the reset may come a little later
                kinds += [one["type"] for one in events.next()[2]["changes"]]
            assert kinds == ["stored", *["removed"] * 4]
    assert node["text"] == "a" * 32


def test_admins_see_whose_events(server: LiveServer) -> None:
    with client_of(server, "operator") as client, client.stream("GET", "/v1/cache/events") as answer:
        events = Events(answer)
        assert events.next()[0] == "snapshot"
        fill(server, "b" * 16, "bob")
        (change,) = events.next()[2]["changes"]
        assert (change["tenant"], change["cache_salt"], change["tokens"]) == ("bob", "", 16)


async def test_a_reader_that_is_too_far_behind_is_told() -> None:
    engine = ScriptedEngine()
    feed = CacheFeed(engine.cache, log_events=10)
    await feed.join()
    await engine.cache.match([1])

    async def store(tenant: str, count: int) -> None:
        for number in range(count):
            lease = engine.prefix_cache.acquire([number] * 16, engine.cache.namespace(tenant))
            lease.commit(16)
            lease.release()

    await store("ada", 3)
    while feed.cursor(("ada", ""), False) < 3:
        await asyncio.sleep(0)
    assert [change.cursor for change in feed.since(1, ("ada", ""), False, 10) or []] == [2, 3]
    await store("bob", 9)
    while feed.cursor(None, True) < 12:
        await asyncio.sleep(0)
    assert feed.since(1, ("ada", ""), False, 10) is None
    assert feed.since(3, ("ada", ""), False, 10) == []
    assert feed.since(0, ("bob", ""), False, 4) is not None
    assert feed.since(1, ("ada", ""), True, 10) is None
    assert len(feed.since(2, ("ada", ""), True, 20) or []) == 10
    feed.unsubscribe()
    feed.close()


def test_streams_end_when_the_engine_does(server: LiveServer) -> None:
    server.engine.prefix_cache = PrefixCache(50, 16)
    with client_of(server, "ada") as client, client.stream("GET", "/v1/cache/events") as answer:
        events = Events(answer)
        assert events.next()[0] == "snapshot"
        asyncio.run(server.engine.close())
        fill(server, "x" * 16, "ada")
        assert events.next()[2]["error"]["code"] == "engine_stopped"
