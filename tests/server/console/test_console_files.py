# SPDX-License-Identifier: Apache-2.0
"""The console's static files: sent without a key, under a strict policy, and nothing else with them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from live_server import LiveServer, live_server
from scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(), api_keys=["ada=secret-of-ada"]) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def test_the_page_and_all_it_loads_need_no_key(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert "console/app.js" in loaded
    for path in loaded:
        answer = client.get("/" + path)
        assert (answer.status_code, len(answer.content) > 0) == (200, True), path
        for module in re.findall(r'from "\./([^"]+)"', answer.text):
            assert client.get(f"/console/{module}").headers["content-type"].startswith("text/javascript")
    assert client.get("/v1/cache").status_code == 401


def test_the_policy_allows_this_server_alone_and_nothing_inline(client: httpx.Client) -> None:
    for path in ("/", "/console/app.js", "/console/style.css", "/console/icon.svg"):
        headers = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy.pop("default-src") == "'none'"
        assert policy.pop("img-src") == "'self' data:", "thumbnails of images that were fetched with the key"
        assert set(policy.values()) == {"'self'", "'none'"}
        assert headers["x-content-type-options"] == "nosniff"
    page = client.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|https?://", page)


def test_browsers_that_have_a_file_are_told_so(client: httpx.Client) -> None:
    first = client.get("/console/app.js")
    again = client.get("/console/app.js", headers={"If-None-Match": f'"other", W/{first.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/console/app.js", headers={"If-None-Match": '"other"'}).status_code == 200
    head = client.head("/console/app.js")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(first.content)))


@pytest.mark.parametrize(
    "path", ["/console/", "/console/../routes.py", "/console/%2e%2e/routes.py", "/console/x.js"]
)
def test_nothing_else_is_sent(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer secret-of-ada"}).status_code == 404


def test_the_console_can_be_left_out() -> None:
    with live_server(ScriptedEngine(), console=False) as server, server.http() as client:
        assert client.get("/").status_code == 405  # HEAD alone: whether a server is there
        assert client.get("/console/app.js").status_code == 404
        assert client.get("/v1/cache").status_code == 200
