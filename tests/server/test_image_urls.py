# SPDX-License-Identifier: Apache-2.0
"""Images by their addresses: only public ones are reached, at each hop, within bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from live_server import live_server
from scripted_engine import ScriptedEngine
from scripted_images import ScriptedImageProcessor, file_of, picture

from radixkv.errors import InvalidRequestError
from radixkv_server.chats.image_fetcher import ImageFetcher, is_public

PNG = file_of(picture(1))
NAMES = {
    "images.example": ["127.0.0.1"],
    "inside.example": ["10.0.0.7"],
    "both.example": ["127.0.0.1", "10.0.0.7"],
    "none.example": [],
    "127.0.0.1": ["127.0.0.1"],
    "169.254.169.254": ["169.254.169.254"],
}


class Site(BaseHTTPRequestHandler):
    """A site with an image, redirects, and what bounds are for."""

    hosts: list[str]
    release: threading.Event

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        path = self.path
        if path.startswith("/to/"):
            self._answer(302, b"", location=path.removeprefix("/to/"))
        elif path == "/slow":
            self.release.wait(60)
            self._answer(200, PNG)
        elif path == "/packed":
            self._answer(200, PNG, content_encoding="gzip")
        elif path == "/large":
            self._answer(200, bytes(100_000))
        elif path == "/missing":
            self._answer(404, b"no")
        else:
            self._answer(200, PNG)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the client has read enough
            self.close_connection = True


@pytest.fixture
def site() -> Iterator[ThreadingHTTPServer]:
    Site.hosts, Site.release = [], threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    Site.release.set()
    server.shutdown()
    server.server_close()
    thread.join()


class Names:
    """A resolver that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return NAMES[host]


def local(address: str) -> bool:
    """Stands for `is_public`: the test's own site counts as public."""
    return address == "127.0.0.1" or is_public(address)


def fetch(
    site: ThreadingHTTPServer,
    path: str,
    host: str = "images.example",
    *,
    allows: Callable[[str], bool] = local,
    timeout_s: float = 30,
    names: Names | None = None,
) -> bytes:
    fetcher = ImageFetcher(50_000, timeout_s, resolve=names or Names(), allows=allows)
    return asyncio.run(fetcher.fetch(f"http://{host}:{site.server_port}{path}"))


def test_an_image_is_fetched_with_its_hosts_name(site: ThreadingHTTPServer) -> None:
    names = Names()
    assert fetch(site, "/cat.png", names=names) == PNG
    assert names.asked == ["images.example"], "resolved once"
    assert Site.hosts == [f"images.example:{site.server_port}"]


def test_redirects_are_followed_and_each_host_is_resolved(site: ThreadingHTTPServer) -> None:
    names = Names()
    assert fetch(site, "/to//cat.png", names=names) == PNG
    assert names.asked == ["images.example"] * 2


@pytest.mark.parametrize("host", ["inside.example", "both.example", "none.example", "169.254.169.254"])
def test_hosts_inside_are_not_reached(site: ThreadingHTTPServer, host: str) -> None:
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch(site, "/cat.png", host)
    with pytest.raises(InvalidRequestError, match="not public"):
        fetch(site, f"/to/http://{host}:{site.server_port}/cat.png")
    assert len(Site.hosts) == 1, "the redirect itself alone"


def test_this_machine_is_not_reached(site: ThreadingHTTPServer) -> None:
    for host in ("images.example", "127.0.0.1"):
        with pytest.raises(InvalidRequestError, match="not public"):
            fetch(site, "/cat.png", host, allows=is_public)
    assert not Site.hosts


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/to/file:///etc/passwd", "something else than http"),
        ("/to/gopher://images.example/", "something else than http"),
        ("/to/http://me:secret@images.example/", "user's name"),
        ("/to//to//to//to//cat.png", "redirects more than 3 times"),
        ("/missing", "status 404"),
        ("/packed", "compressed"),
        ("/large", "max_image_bytes"),
    ],
)
def test_other_answers_are_refused(site: ThreadingHTTPServer, path: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        fetch(site, path)


def test_a_slow_site_has_its_time(site: ThreadingHTTPServer) -> None:
    with pytest.raises(InvalidRequestError, match="image_url_timeout_s"):
        fetch(site, "/slow", timeout_s=0.2)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.10",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2001:0:0:0:0:0:8000:ff",
        "fe80::1%eth0",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "192.0.0.8",
        "192.88.99.1",
        "3fff::1",
        "5f00::1",
        "::ffff:0:7f00:1",
        "64:ff9b:1::7f00:1",
        "not an address",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/x",
        "http://localhost/x",
        "http://[::1]/x",
        "http://2130706433/x",
        "http://0x7f.1/x",
    ],
)
def test_a_server_that_fetches_refuses_what_is_inside(url: str) -> None:
    engine = ScriptedEngine(image_processor=ScriptedImageProcessor())
    image = {"type": "image_url", "image_url": {"url": url}}
    with live_server(engine, image_urls=True) as server, server.http() as http:
        body = {"messages": [{"role": "user", "content": [image]}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_image", "messages[0].content[0]")
        assert not engine.requests
