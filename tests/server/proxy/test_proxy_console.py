# SPDX-License-Identifier: Apache-2.0
"""What the console of a proxy shows of the traffic: the tree, and of each request what was to be found."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server
from raw_http import connect, request_of
from running_proxy import fleet_here, running_proxy
from scripted_engine import ScriptedEngine
from scripted_upstream import scripted_upstream
from typer.testing import CliRunner
from waiting import until

from radixkv.cli.main import command_tree

KEY = "sk-secret-0123456789abcdef"
SYSTEM = "You are the harbour master of Bergen. " * 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(caches=True, num_blocks=2000)) as running:
        yield running


@pytest.fixture
def console(server: LiveServer) -> Iterator[tuple[str, httpx.Client]]:
    """The proxy's address, and a client of its console."""
    port = free_port()
    with (
        running_proxy(server.url, "--console-port", str(port)) as proxy,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        until(lambda: reachable(client))
        yield proxy.url, client


def reachable(client: httpx.Client) -> bool:
    try:
        return client.get("/v1/cache").status_code == 200
    except httpx.TransportError:
        return False


def ask(url: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": messages, "max_tokens": 6, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
    return dict(answer.json())


def seen(client: httpx.Client, count: int) -> list[dict[str, Any]]:
    """The requests that the console has, oldest first, once there are so many."""
    data: Any = until(
        lambda: found if len(found := client.get("/v1/cache/requests").json()["data"]) >= count else None
    )
    return list(reversed(data))


def test_requests_are_shown_with_what_was_expected(console: tuple[str, httpx.Client]) -> None:
    url, client = console
    first = {"role": "system", "content": "It is 07:59. " + SYSTEM}
    messages = [first, {"role": "user", "content": "Which ships are here?"}]
    answer = ask(url, messages)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "And tomorrow?"}]
    messages = [{"role": one["role"], "content": one["content"]} for one in messages]
    ask(url, messages)
    messages[0]["content"] = "It is 08:01. " + SYSTEM
    told = ask(url, messages)["usage"]
    one, second, third = seen(client, 3)
    assert one["expected_tokens"] == 0
    assert second["reason"] == "hit"
    assert 0 < second["expected_tokens"] <= second["prompt_tokens"]
    assert third["reported_tokens"] == told["prompt_tokens_details"]["cached_tokens"]
    assert third["prompt_tokens"] == told["prompt_tokens"]
    assert third["reason"] == "diverged"
    shown = client.get(f"/v1/cache/requests/{third['id']}").json()["explanation"]
    assert "8:01. You are" in shown["around"]["prompt"]
    assert "harbour" in shown["around"]["cached"]
    assert shown["breaker"]["kind"] == "timestamp"
    assert shown["advice"]
    (worst,) = client.get("/v1/cache/advice?limit=1").json()["data"]
    assert worst["recoverable_tokens"] > 0
    overview = client.get("/v1/cache").json()
    assert overview["windows"]["total"]["requests"] == 3
    assert overview["missed_tokens"]["diverged"] > 0
    assert KEY not in client.get("/v1/cache/requests").text + client.get("/v1/cache/tree").text


@pytest.mark.nightly
def test_the_tree_is_that_of_the_prompts(console: tuple[str, httpx.Client]) -> None:
    url, client = console
    for word in ("one", "two", "three"):
        ask(url, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{word} ships?"}])
    seen(client, 3)
    tree = client.get("/v1/cache/tree").json()
    top = tree["nodes"][0]
    assert top["parent"] is None
    assert "harbour master" in top["text"]
    assert top["children"] == 3
    assert tree["complete"]
    found = client.get("/v1/cache/tree", params={"search": "TWO ships"}).json()
    assert found["found"] == 1


@pytest.mark.nightly
def test_an_upstream_that_misses_is_told_from_a_prompt_that_breaks(tmp_path: Path) -> None:
    """The engine is told to forget between two equal prompts: that is not the prompt's fault."""
    port = free_port()
    with (
        live_server(ScriptedEngine(caches=True, num_blocks=2000)) as server,
        running_proxy(server.url, "--console-port", str(port)) as proxy,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which ships?"}]
        ask(proxy.url, messages)
        assert httpx.post(f"{server.url}/v1/cache/reset", json={}).status_code == 200
        ask(proxy.url, messages)
        until(lambda: reachable(client))
        _, second = seen(client, 2)
        assert second["reported_tokens"] == 0
        assert second["expected_tokens"] > 100
        assert second["reason"] == "upstream_missed"


def test_prompts_have_their_price_and_the_audit_agrees(tmp_path: Path) -> None:
    """The console, an audit of the record, and one of a record of hashes expect the same of each request."""
    prices, expected = tmp_path / "prices.json", []
    told = {"date": "2026-11-01", "models": {"*": {"input": 2.0, "cache_read": 0.5}}}
    prices.write_text(json.dumps(told))
    port = free_port()
    for number, more in enumerate(([], ["--redact"])):
        record, report = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.json"
        console = ["--console-port", str(port), "--prices", str(prices)]
        with (
            live_server(ScriptedEngine(caches=True, num_blocks=2000)) as server,
            running_proxy(server.url, "--record", str(record), *console, *more) as proxy,
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ):
            for text in ("Where is it?", "Where is it now?", "Where is it?"):
                ask(proxy.url, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}])
            until(lambda client=client: reachable(client))
            requests = seen(client, 3)
            for one in requests:
                rest = one["prompt_tokens"] - one["cached_tokens"]
                assert one["cost"]["prompt"] == pytest.approx((rest * 2.0 + one["cached_tokens"] * 0.5) / 1e6)
        result = CliRunner().invoke(command_tree(), ["audit", str(record), "--json", str(report)])
        assert result.exit_code == 0, result.output
        audited = json.loads(report.read_text())["requests"]
        assert [one["reported_cached_tokens"] for one in audited] == [
            one["reported_tokens"] for one in requests
        ]
        expected.append([one["predicted_cached_tokens"] for one in audited])
        if not more:
            assert expected[0] == [one["expected_tokens"] for one in requests]
    for plain, hashed in zip(*expected, strict=True):
        assert abs(plain - hashed) <= 16, "within a word of sixteen characters"


@pytest.mark.nightly
def test_the_page_is_the_servers(console: tuple[str, httpx.Client], server: LiveServer) -> None:
    _, client = console
    page = client.get("/")
    assert 'data-views="overview tree requests"' in page.text
    assert "Content-Security-Policy" in page.headers
    with server.http() as other:
        for path in ("/console/app.js", "/console/requests.js"):
            assert client.get(path).content == other.get(path).content
        assert page.text.replace(' data-views="overview tree requests"', "") == other.get("/").text
    assert "radixkv_time_to_first_token_seconds_bucket" in client.get("/metrics").text
    assert client.get("/v1/cache/requests/none").status_code == 404
    assert client.get("/v1/cache", headers={"Host": "evil.example"}).status_code == 400
    assert client.post("/v1/cache/reset").status_code in (404, 405), "it only reads"


@pytest.mark.nightly
def test_requests_that_run_are_shown_of_several_upstreams_too() -> None:
    port = free_port()
    with (
        scripted_upstream() as upstream,
        fleet_here([f"http://127.0.0.1:{upstream.port}"], port) as proxy,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        until(lambda: reachable(client))

        def running() -> int:
            return int(client.get("/v1/cache").json()["running_requests"])

        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": SYSTEM}]}).encode()
        with connect(proxy.port) as asking:
            asking.sendall(request_of("endless", body=body))
            assert asking.recv(65536)
            until(lambda: running() == 1)
            # What is asked meanwhile finds it, once it has an answer; none was told yet.
            with connect(proxy.port) as other:
                other.sendall(request_of("last_closed", body=body))
                while other.recv(65536):
                    pass
            (one,) = until(lambda: client.get("/v1/cache/requests").json()["data"])
            assert one["expected_tokens"] > 0, "the one that runs was asked before"
        until(lambda: running() == 0)
        assert [one["state"] for one in seen(client, 2)] == ["failed", "finished"]


def test_several_upstreams_are_shown_and_why_a_request_went_where(server: LiveServer) -> None:
    port = free_port()
    with (
        live_server(ScriptedEngine(caches=True, num_blocks=2000)) as other,
        fleet_here([server.url, other.url, f"http://127.0.0.1:{free_port()}"], port) as proxy,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        until(lambda: reachable(client))
        until(lambda: [state.health for state in proxy.fleet.states()] == ["healthy", "healthy", "failed"])
        for word in ("one", "two", "three"):
            ask(
                proxy.url,
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{word} ships?"}],
            )
        first, *later = seen(client, 3)
        assert first["choice"]["resident"] == 0
        for one in later:
            assert one["upstream"] == first["upstream"]
            assert one["choice"]["reason"] == "prefix"
            assert 0 < one["choice"]["resident"] <= one["choice"]["units"]
            assert not one["choice"]["failed"]

        def known() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = client.get("/v1/cache").json()["upstreams"]
            return found

        until(lambda: sum(one["blocks"] for one in known()))
        until(lambda: not any(one["queue_s"] for one in known()))
        upstreams = {one["address"]: one for one in known()}
        assert [one["health"] for one in upstreams.values()] == ["healthy", "healthy", "failed"]
        assert upstreams[first["upstream"]]["requests"] == 3
        assert upstreams[first["upstream"]]["token_hit_rate"] > 0
        assert {one["knows"] for one in upstreams.values()} == {"guess"}
