# SPDX-License-Identifier: Apache-2.0
"""The server's and the proxy's console, where every text of a request is meant to break what shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from browser_page import console
from free_ports import free_ports
from live_server import LiveServer, live_server
from pydantic_core import from_json
from scripted_engine import ScriptedEngine

from radixkv.observe.audit.exchange import Exchange
from radixkv_server.proxy.feed import Seen
from radixkv_server.proxy.observer import Observer, ObserverSettings

MARKUP = r"</script><script>window.taken=1</script><img src=x onerror='window.taken=1'>${window.taken=1}"
#: Inside of a string of JSON.
TEXTS = {
    "lone surrogates": r"\ud800 \udfff\ud83d",
    "markup": MARKUP,
    "NUL and escapes": r"\u0000\u001b[2J\u009b31m\u0007\u0008",
    "marks of direction": r"\u202e\u2066\u200f\u2028\u2029\ufeff",
    "a path": r"../../../etc/passwd%00?a=b#/tree&\\",
    "a prototype": "__proto__",
}
BODIES = {
    "/v1/chat/completions": [
        '{"messages": [{"role": "system", "content": "TEXT NUMBER"}, {"role": "user", "content": "TEXT"}], '
        '"user": "TEXT", "metadata": {"TEXT": "TEXT"}}',
        '{"messages": [{"role": "user", "content": "TEXT NUMBER"}], "tools": [{"type": "function", '
        '"function": {"name": "TEXT", "description": "TEXT", "parameters": {"TEXT": "TEXT"}}}]}',
    ],
    "/v1/messages": [
        '{"max_tokens": 4, "system": "TEXT NUMBER", "messages": [{"role": "user", "content": "TEXT"}], '
        '"metadata": {"user_id": "TEXT"}}',
    ],
    "/v1/responses": ['{"input": "TEXT NUMBER", "instructions": "TEXT", "prompt_cache_key": "TEXT"}'],
    "/v1/completions": ['{"prompt": "TEXT NUMBER", "cache_salt": "TEXT"}', '{"prompt": "TEXT NUMBER"}'],
}
ODD = {
    "/v1/chat/completions": [
        '{"model": null, "messages": null}',
        '{"messages": [null, {"role": null, "content": null}], "tools": [null], "metadata": null}',
        '{"messages": [{"role": "user", "content": [null, {"type": null, "text": null}]}]}',
        '{"messages": [{"role": "user", "content": "LINE"}]}',
        '{"messages": {"role": "user"}, "tools": {}, "model": ["m"], "stream": "yes"}',
    ],
    "/v1/messages": ['{"system": null, "messages": [{"role": "user", "content": [null]}], "tools": null}'],
    "/v1/responses": ['{"input": [null, {"type": null}], "instructions": null}'],
}


@dataclass
class Consoles:
    """The servers whose consoles show the same requests."""

    server: LiveServer
    proxy_url: str
    statuses: list[int]

    @property
    def urls(self) -> dict[str, str]:
        return {"server": self.server.url, "proxy": self.proxy_url}


def bodies() -> Iterator[tuple[str, str]]:
    """Path and body of each request; all but the last character of a prompt comes twice."""
    for text in TEXTS.values():
        for path, written in BODIES.items():
            for body in written:
                for number in "12":
                    yield path, body.replace("TEXT", text).replace("NUMBER", number)
    for path, written in ODD.items():
        for body in written:
            yield path, body.replace("LINE", "x" * 1_000_000)


@pytest.fixture(scope="module")
def consoles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consoles]:
    (port,) = free_ports(1)
    record = tmp_path_factory.mktemp("record") / "record.jsonl"
    settings = ObserverSettings(record, False, 1 << 30, 1, bytes(32), "radixkv", "127.0.0.1", port, 1 << 26)
    observer, statuses = Observer(settings), []
    with live_server(ScriptedEngine(caches=True)) as server, server.http() as http:
        for number, (path, body) in enumerate(bodies()):
            answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
            statuses.append(answer.status_code)
            exchange = Exchange(path, body.encode(), answer.content, status=answer.status_code, time=number)
            observer.take(Seen(number, exchange, True, "http://e", "", (), True, 0))
        yield Consoles(server, f"http://127.0.0.1:{port}", statuses)
    observer.close()
    for line in record.read_bytes().splitlines():
        from_json(line)


def shown(http: httpx.Client, path: str, **options: Any) -> Any:
    """What a route of a console answers: JSON that every reader takes, and not the megabyte itself."""
    answer = http.get(path, **options)
    assert answer.status_code == 200, (path, answer.text[:300])
    assert len(answer.content) < 400_000, path
    assert answer.headers["content-type"].startswith("application/json"), path
    return from_json(answer.content)  # which takes no lone surrogate


def test_no_request_is_a_fault_of_the_server(consoles: Consoles) -> None:
    assert {200, 400} <= set(consoles.statuses) <= {200, 400, 413, 422}


@pytest.mark.parametrize("name", ["server", "proxy"])
def test_all_routes_of_a_console_answer(name: str, consoles: Consoles) -> None:
    with httpx.Client(base_url=consoles.urls[name], timeout=120) as http:
        listed = shown(http, "/v1/cache/requests", params={"limit": 200})["data"]
        assert len(listed) > 30
        for one in listed:
            shown(http, f"/v1/cache/requests/{one['id']}")
        shown(http, "/v1/cache")
        shown(http, "/v1/cache/advice")
        for search in ("", "x", "\0", "<script>", "\u202e", "%ED%A0%80"):
            shown(http, "/v1/cache/tree", params={"search": search} if search else {})
        nodes = shown(http, "/v1/cache/tree")
        assert MARKUP[:8] in str(nodes) or "script" in str(nodes)
        assert http.get("/metrics").status_code == 200
        for path in ("/v1/cache/requests/%00", "/v1/cache/requests/%ff%ed%a0%80", "/v1/cache/requests/../.."):
            assert http.get(path).status_code in (200, 400, 404)


def test_what_is_asked_of_the_servers_console(consoles: Consoles) -> None:
    with consoles.server.http() as http:
        for text in TEXTS.values():
            for path in ("/v1/cache/explain", "/v1/cache/pins"):
                body = f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'
                answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
                assert answer.status_code in (200, 201, 400), answer.text
                from_json(answer.content)
        shown(http, "/v1/cache/pins")


@pytest.mark.parametrize("name", ["server", "proxy"])
def test_a_browser_shows_text_and_runs_none(name: str, browser: Any, consoles: Consoles) -> None:
    url = consoles.urls[name]
    listed = httpx.get(f"{url}/v1/cache/requests", params={"limit": 200}, timeout=60).json()["data"]
    marked = [one["id"] for one in listed if "script" in str(one)][:1]
    views = ["overview", "requests", "tree", *(f"requests/{one}" for one in [listed[-1]["id"], *marked])]
    with console(browser, url) as page:
        for view in views:
            page.goto(f"{url}/#/{view}")
            page.get_by_role("heading").first.wait_for()
            assert page.evaluate("window.taken") is None, view
            assert not page.locator("main script, main img").count(), view
