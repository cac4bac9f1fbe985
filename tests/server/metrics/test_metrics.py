# SPDX-License-Identifier: Apache-2.0
"""/metrics: what is counted is what the answers said, and every figure of the dashboard is there."""

from __future__ import annotations

import re
from typing import Any

import httpx
from live_server import LiveServer, chat, live_server
from scripted_engine import ScriptedEngine

from radixkv_server.metrics.request_metrics import MAX_VALUES, OTHERS, BoundedLabel

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def scrape(server: LiveServer, **headers: str) -> dict[str, float]:
    """Samples by name with labels."""
    lines = httpx.get(server.url + "/metrics", headers=headers).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def total(values: dict[str, float], name: str, **labels: str) -> float:
    """The sum over all samples of a name that have these labels."""

    def fits(key: str) -> bool:
        return key.split("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items())

    return sum(value for key, value in values.items() if fits(key))


def test_requests_and_the_engine_are_counted(server: LiveServer, engine: ScriptedEngine) -> None:
    with server.http() as client:
        client.post(CHAT, json=chat("say:hello", stream=True))
        client.post(CHAT, json=chat("say:hello"))
        client.post(CHAT, json={})
        client.get("/no/such/path/" + "x" * 50)
    values = scrape(server)
    assert values[f'radixkv_http_requests_total{{route="{CHAT}",status="200"}}'] == 2
    assert values[f'radixkv_http_requests_total{{route="{CHAT}",status="400"}}'] == 1
    assert values['radixkv_http_requests_total{route="unmatched",status="404"}'] == 1
    for name in ("time_to_first_token", "request_duration", "queue", "prefill", "decode"):
        assert total(values, f"radixkv_{name}_seconds_count") == 2, name
    assert total(values, "radixkv_inter_token_latency_seconds_count") == 2 * 5, "six tokens, five gaps"
    assert total(values, "radixkv_finished_samples_total", reason="stop") == 2
    assert total(values, "radixkv_sample_tokens_sum") == 12
    stats = engine.stats()
    assert values["radixkv_computed_prompt_tokens_total"] == stats.computed_prompt_tokens
    assert values["radixkv_prefix_cache_hit_ratio"] == 0.75
    assert values["radixkv_requests_waiting"] == 3
    assert values["radixkv_requests_running"] == 2
    assert values["radixkv_prompts_waiting_for_turn"] == stats.prompts_waiting_for_turn == 1
    assert values["radixkv_reserved_tokens"] == stats.reserved_tokens == 700
    states = [values[f'radixkv_kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "held")]
    assert states == [70, 20, 10]
    assert sum(states) == values["radixkv_kv_blocks_capacity"]
    assert values["radixkv_kv_cache_usage_ratio"] == 0.1
    assert values["radixkv_preemptions_total"] == 1
    assert values["radixkv_evicted_blocks_total"] == 5
    assert values['radixkv_evicted_block_age_seconds_bucket{le="+Inf"}'] == 0
    assert values["radixkv_event_loop_lag_seconds_count"] >= 0


def test_counters_are_the_sums_over_all_usages(server: LiveServer) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat("say:hello")),
        (CHAT, chat("say:hello", n=3, max_tokens=2)),
        (CHAT, chat("say:x", stream=True, stream_options={"include_usage": True}, n=2)),
        (TEXT, {"prompt": ["say:one", "say:three"], "n": 2}),
        (TEXT, {"prompt": ["say:one", "b"], "stream": True, "stream_options": {"include_usage": True}}),
        (TEXT, {"prompt": "say:abc", "echo": True, "max_tokens": 0, "logprobs": 1}),
        (TEXT, {"prompt": "say:abc", "best_of": 3}),
    ]
    usages = []
    with server.http() as client:
        for path, body in bodies:
            answer = client.post(path, json=body)
            assert answer.status_code == 200
            if body.get("stream"):
                events = [line for line in answer.text.splitlines() if '"usage":{' in line]
                usages.append(httpx.Response(200, text=events[-1].removeprefix("data: ")).json()["usage"])
            else:
                usages.append(answer.json()["usage"])
        assert client.post(CHAT, json=chat("x" * 100_000)).status_code == 400
    values = scrape(server)
    details = [usage["prompt_tokens_details"] for usage in usages]
    assert total(values, "radixkv_prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert total(values, "radixkv_generated_tokens_total") == sum(u["completion_tokens"] for u in usages)
    assert total(values, "radixkv_cached_prompt_tokens_total") == sum(d["cached_tokens"] for d in details)
    assert total(values, "radixkv_cache_write_tokens_total") == sum(d["cache_write_tokens"] for d in details)
    assert total(values, "radixkv_finished_samples_total") == 1 + 3 + 2 + 4 + 2 + 1 + 1
    assert total(values, "radixkv_request_prompt_tokens_count") == 9


def test_tokens_written_are_those_that_messages_tells(server: LiveServer) -> None:
    """On Messages, what is written is what lies before the last breakpoint."""
    mark = {"cache_control": {"type": "ephemeral"}}
    told = 0
    with server.http() as client:
        for part in ({}, mark):
            ships = {"type": "text", "text": "count the ships " * 9, **part}
            content = [ships, {"type": "text", "text": "x"}]
            body = {"model": "scripted", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
            answer = client.post("/v1/messages", json=body)
            assert answer.status_code == 200
            told += answer.json()["usage"]["cache_creation_input_tokens"]
    assert told > 0
    assert total(scrape(server), "radixkv_cache_write_tokens_total") == told


def test_the_first_token_is_timed_once_a_request(server: LiveServer) -> None:
    with server.http() as client:
        for stream in (True, False):
            client.post(TEXT, json={"prompt": ["say:one", "say:two", "say:three"], "n": 2, "stream": stream})
    values = scrape(server)
    assert total(values, "radixkv_time_to_first_token_seconds_count") == 2
    # The scripted engine says that half of each prompt was cached, rounded down.
    assert total(values, "radixkv_time_to_first_token_seconds_count", hit="0-50%") == 2


def test_a_cancelled_stream_counts_as_aborted(server: LiveServer, engine: ScriptedEngine) -> None:
    engine.hold_at = 2
    engine.gate.clear()
    body = chat("say:hello", stream=True)
    with server.http() as client, client.stream("POST", CHAT, json=body) as stream:
        next(stream.iter_lines())
    engine.wait_until(lambda: engine.requests[0].aborted)
    engine.gate.set()
    with server.http() as client:
        while not total(values := scrape(server), "radixkv_finished_samples_total", reason="abort"):
            client.get("/health")
    assert total(values, "radixkv_finished_samples_total") == 1


def test_tenants_have_labels_of_their_own_where_there_are_keys(engine: ScriptedEngine) -> None:
    with live_server(engine, api_keys=("anna=one", "ben=two"), admin_keys=("ops=adm",)) as server:
        for key, times in (("one", 2), ("two", 1)):
            headers = {"Authorization": f"Bearer {key}"}
            for _ in range(times):
                httpx.post(server.url + CHAT, json=chat("say:hi"), headers=headers)
        values = scrape(server, Authorization="Bearer adm")
    assert total(values, "radixkv_finished_samples_total", tenant="anna") == 2
    assert total(values, "radixkv_finished_samples_total", tenant="ben") == 1
    assert total(values, "radixkv_time_to_first_token_seconds_count", tenant="anna") == 2
    anna = total(values, "radixkv_prompt_tokens_total", tenant="anna")
    assert anna == 2 * total(values, "radixkv_prompt_tokens_total", tenant="ben") > 0


def test_a_user_sees_its_own_figures_alone(engine: ScriptedEngine) -> None:
    """Nothing that one tenant reads changes with what another one does, in whatever form it asks."""
    forms = ("*/*", "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0")
    keys = ("anna=one", "ben=two", "others=three", "idle=four")

    def seen(server: LiveServer, key: str) -> dict[str, str]:
        headers = [{"x-api-key": key, "Accept": form} for form in forms]
        return {h["Accept"]: httpx.get(server.url + "/metrics", headers=h).text for h in headers}

    with live_server(engine, api_keys=keys, admin_keys=("ops=adm",), vllm_metrics=True) as server:
        for key in ("one", "three"):
            httpx.post(server.url + CHAT, json=chat("say:hi"), headers={"x-api-key": key})
        before = {key: seen(server, key) for key in ("one", "three", "four")}
        httpx.post(server.url + CHAT, json=chat("say:a longer answer"), headers={"x-api-key": "two"})
        httpx.post(server.url + CHAT, json=chat("say:x", stream=True), headers={"x-api-key": "adm"})
        httpx.post(server.url + CHAT, json={}, headers={"x-api-key": "two"})
        after = {key: seen(server, key) for key in before}
        own, everything = scrape(server, **{"x-api-key": "one"}), scrape(server, **{"x-api-key": "adm"})
    assert after == before
    assert all(re.search('tenant="(?!anna")', name) is None for name in own)
    of_anna = {name: value for name, value in everything.items() if 'tenant="anna"' in name}
    assert of_anna.items() <= own.items()
    for theirs, ours in (
        ("vllm:prompt_tokens", "radixkv_prompt_tokens"),
        ("vllm:request_success", "radixkv_finished_samples"),
    ):
        assert total(own, f"{theirs}_total") == total(of_anna, f"{ours}_total") > 0
    assert total(own, "vllm:e2e_request_latency_seconds_count") == 1
    assert own["radixkv_healthy"] == 1
    assert not any("tenant=" in line or "vllm:" in line for line in before["four"]["*/*"].splitlines())
    assert {"ben", "ops", "others"} <= {
        found[1] for name in everything if (found := re.search('tenant="([^"]+)"', name))
    }


def test_labels_of_tenants_are_bounded() -> None:
    labels = BoundedLabel("tenant")
    seen = {labels.values(f"tenant-{number}") for number in range(3 * MAX_VALUES)}
    assert len(seen) == MAX_VALUES + 1
    assert (OTHERS,) in seen
    assert labels.values("tenant-0") == ("tenant-0",)
    assert labels.own("tenant-0") == "tenant-0"
    assert labels.own(f"tenant-{MAX_VALUES}") is None
    labels = BoundedLabel("tenant")
    assert (labels.values(OTHERS), labels.own(OTHERS)) == ((OTHERS,), None), "a tenant of that name shares it"
    assert BoundedLabel("tenant", False).values("anyone") == ()


def test_two_servers_have_metrics_of_their_own() -> None:
    with live_server(ScriptedEngine()) as one, live_server(ScriptedEngine()) as two:
        httpx.post(one.url + CHAT, json=chat("x"))
        assert total(scrape(one), "radixkv_finished_samples_total") == 1
        assert total(scrape(two), "radixkv_finished_samples_total") == 0


#: What vLLM's dashboards ask for.
VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "num_preemptions_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_sum",
}


def test_vllms_names_on_request(engine: ScriptedEngine) -> None:
    keys = ("anna=one", "ben=two")
    with live_server(engine, api_keys=keys, admin_keys=("ops=adm",), vllm_metrics=True) as server:
        for key in ("one", "two"):
            httpx.post(server.url + CHAT, json=chat("say:hi"), headers={"Authorization": f"Bearer {key}"})
        values = scrape(server, Authorization="Bearer adm")
    names = {key.split("{")[0] for key in values}
    assert {f"vllm:{name}" for name in VLLM} <= names
    model = engine.model_name
    for key in values:
        if key.startswith("vllm:"):
            assert f'model_name="{model}"' in key
            assert "tenant=" not in key
            assert "hit=" not in key
    assert total(values, "vllm:request_success_total", finished_reason="stop") == 2
    assert total(values, "vllm:prompt_tokens_total") == total(values, "radixkv_prompt_tokens_total")
    buckets = [key for key in values if key.startswith("vllm:time_to_first_token_seconds_bucket")]
    assert len(buckets) == len({re.search(r'le="([^"]+)"', key)[1] for key in buckets}), "one line a bound"
    assert total(values, "vllm:time_to_first_token_seconds_bucket", le="+Inf") == 2


def test_no_vllm_names_unless_asked_for(server: LiveServer) -> None:
    assert "vllm:" not in httpx.get(server.url + "/metrics").text
